"""Turn the demo model's GGUF file into a Hugging Face folder: `python -m deploy.convert_gguf FILE.gguf FOLDER`.

A process of its own, so that torch and transformers never weigh on the command that started it. It goes through
transformers' GGUF reader rather than `from_pretrained(gguf_file=...)`: the model is only built on the meta device
(for its parameter names), so nothing is initialised, no accelerate is needed, and it takes a third of the time.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def convert(source: Path, target: Path) -> None:
    """Write config, generation config, tokenizer with chat template and fp32 weights of `source` to folder `target`.

    The weights are what the quantized blocks stand for, in float32: 16-bit floats would round them a second time.
    Tied output embeddings are not written twice.
    """
    origin = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    target.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(**origin)
    config.dtype = torch.float32
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(skeleton).__name__]
    save_file(read_weights(source, skeleton), target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(**origin)
    # transformers ignores the GGUF's pre-tokenizer name ("smollm": GPT-2's, with each digit by itself).
    digits_apart = PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = digits_apart
    tokenizer.save_pretrained(target, save_jinja_files=False)


def read_weights(source: Path, skeleton: Any) -> dict[str, torch.Tensor]:
    """Dequantized tensors of `source` under the parameter names of `skeleton` (a transformers model on any device)."""
    weights: dict[str, torch.Tensor] = load_gguf_checkpoint(str(source), True, skeleton)["tensors"]
    missing = skeleton.state_dict().keys() - weights.keys() - set(skeleton._tied_weights_keys or ())
    assert not missing, f"{source} lacks {sorted(missing)}"
    return weights


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
