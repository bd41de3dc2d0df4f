"""Reading config.json: both spellings, every architecture, and what is refused in which words."""

from typing import Any

import pytest

from common.engine.models.config import ModelConfig, RopeConfig
from common.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**fields: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | fields)


def test_defaults() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert not config.tie_word_embeddings
    assert config.dtype is None


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
        ({"rope_theta": 100, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(100.0, "linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3_SCALING}}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
    ],
)
def test_both_spellings_of_rotary_settings(fields: dict[str, Any], rope: RopeConfig) -> None:
    assert parse(**fields).rope == rope


def test_biases_and_norms_by_architecture() -> None:
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = parse(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 128)
    mistral = parse(architectures=["MistralForCausalLM"], attention_bias=True)
    assert (mistral.qkv_bias, mistral.output_bias, mistral.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("fields", "max_length"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8192}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, 1024),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024, "use_sliding_window": True}, 1024),
        ({"sliding_window": 1024}, 4096),
    ],
)
def test_an_active_sliding_window_bounds_the_length(fields: dict[str, Any], max_length: int) -> None:
    assert parse(**fields).max_length == max_length


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures", "must be a list"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'.*silu"),
        ({"vocab_size": None}, "vocab_size", "missing"),
        ({"vocab_size": "many"}, "vocab_size", "'many'.*positive integer"),
        ({"vocab_size": True}, "vocab_size", "positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "0.*positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3.*divide.*4"),
        ({"num_attention_heads": 5}, "hidden_size", "64.*multiple.*5"),
        ({"head_dim": 15}, "head_dim", "15.*even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps", "-1.*positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'.*true or false"),
        ({"dtype": "float8_e4m3"}, "dtype", "float8_e4m3.*bfloat16"),
        ({"torch_dtype": "int8"}, "torch_dtype", "int8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "bits.*not supported"),
        ({"rope_theta": 0}, "rope_theta", "0.*positive"),
        ({"rope_scaling": "llama3"}, "rope_scaling", "must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling", "rope_scaling.type = 'yarn'.*linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters", "rope_parameters.rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters", "rope_parameters.factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters", "partial_rotary_factor = 0.5"),
        ({"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": None}}, "rope_scaling", "low_freq_factor is missing"),
    ],
)
def test_what_is_refused_names_field_and_value(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        parse(**fields)
    assert caught.value.field == field
