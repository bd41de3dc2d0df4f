"""Tiny random models of every supported architecture, written as Hugging Face folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 300
MAX_LENGTH = 512
EOS_TOKEN_ID = 2

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
#: Three query heads to a kv head.
_GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

#: Name -> config class, model class, what differs from `_BASE`.
TINY_MODELS: Mapping[str, tuple[type, type, Mapping[str, Any]]] = {
    "llama2": (LlamaConfig, LlamaForCausalLM, {"num_hidden_layers": 3}),
    "llama3": (
        LlamaConfig,
        LlamaForCausalLM,
        _GROUPED | {"hidden_size": 96, "tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
    ),
    "llama-linear-biased": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": _LINEAR_ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, _GROUPED | {"head_dim": 24, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, _GROUPED | {"head_dim": 32}),
    "qwen3-biased": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def write_tiny_model(folder: Path, name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Write the tiny model `name` (see `TINY_MODELS`) into `folder`; returns transformers' own, in fp32.

    Every parameter is random, norms and biases too, so that one left out or swapped shows in the logits; they are
    spread wide enough that two candidates are hardly ever close.
    """
    config_class, model_class, differences = TINY_MODELS[name]
    config = config_class(**{**_BASE, **differences, **overrides})
    config._attn_implementation = "eager"
    model: PreTrainedModel = model_class(config).eval()
    _randomise(model, seed)
    previous = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    model.save_pretrained(folder)
    transformers.logging.set_verbosity(previous)
    return model


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.3, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.3, generator=generator)
        elif "embed" in name:
            parameter.normal_(0.0, 1.0, generator=generator)
        else:
            parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5, generator=generator)
