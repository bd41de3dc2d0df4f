"""What a decoder looks like: `ModelConfig`, read from a Hugging Face config.json.

Both spellings of the rotary settings are understood (`rope_theta` and `rope_scaling`, or `rope_parameters`).
Anything that would change the mathematics and is not supported is refused here, not ignored. Knows no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.engine.models.architectures import ARCHITECTURES, Architecture
from common.engine.models.fields import ConfigFields
from common.errors import ModelError

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base frequency and how it is stretched."""

    theta: float = 10_000.0
    #: "default", "linear" or "llama3".
    rope_type: str = "default"
    factor: float = 1.0
    #: Only for "llama3".
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of one decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Longest sequence that the model computes exactly: its positions, or its sliding window if that is shorter
    #: (attention here is always full, which up to the window's length is the same).
    max_length: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    #: The weights' own dtype as config.json names it, if it does.
    dtype: str | None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read a parsed config.json.

        Raises:
            ModelError: a field is missing, malformed or not supported; names it and its value.
        """
        fields = ConfigFields(raw)
        architecture = _architecture(fields)
        _refuse_unsupported(fields)
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.refuse("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
        attention_bias = fields.flag("attention_bias")
        return cls(
            architecture=architecture.name,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(fields, architecture, num_heads),
            max_length=_max_length(fields, architecture),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields),
            qkv_bias=_first(architecture.qkv_bias, attention_bias),
            output_bias=_first(architecture.output_bias, attention_bias),
            mlp_bias=_first(architecture.mlp_bias, fields.flag("mlp_bias")),
            qk_norm=architecture.qk_norm,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            dtype=_dtype(fields),
        )


def _first(fixed: bool | None, configured: bool) -> bool:
    return configured if fixed is None else fixed


def _architecture(fields: ConfigFields) -> Architecture:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names:
        raise fields.refuse("architectures", "must be a list with one name")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise fields.refuse("architectures", f"not supported; supported are {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(fields: ConfigFields) -> None:
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.refuse("hidden_act", "not supported; supported is silu")
    if fields.get("quantization_config") is not None:
        raise fields.refuse("quantization_config", "quantised weights are not supported")


def _head_dim(fields: ConfigFields, architecture: Architecture, num_heads: int) -> int:
    hidden = fields.integer("hidden_size")
    if fields.get("head_dim") is None and architecture.default_head_dim is None and hidden % num_heads:
        raise fields.refuse("hidden_size", f"must be a multiple of num_attention_heads = {num_heads}")
    head_dim = fields.integer("head_dim", architecture.default_head_dim or hidden // num_heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", "must be even (rotary positions turn pairs)")
    return head_dim


def _max_length(fields: ConfigFields, architecture: Architecture) -> int:
    positions = fields.integer("max_position_embeddings")
    flag = architecture.sliding_window_flag
    if not architecture.sliding_window or (flag is not None and not fields.flag(flag)):
        return positions
    window = fields.optional_integer("sliding_window", architecture.default_sliding_window)
    return positions if window is None else min(positions, window)


def _dtype(fields: ConfigFields) -> str | None:
    field = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    if fields.get(field) is None:
        return None
    name = fields.text(field)
    if name not in DTYPES:
        raise fields.refuse(field, f"not supported; supported are {', '.join(DTYPES)}")
    return name


def _rope(fields: ConfigFields) -> RopeConfig:
    field = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    theta = fields.number("rope_theta", 10_000.0)
    settings = fields.section(field)
    if settings is None:
        return RopeConfig(theta=theta)
    try:
        return _rope_settings(settings, theta)
    except ModelError as error:
        raise ModelError(error.message.replace("config.json: ", f"config.json: {field}."), field=field) from error


def _rope_settings(settings: ConfigFields, theta: float) -> RopeConfig:
    theta = settings.number("rope_theta", theta)
    type_field = "rope_type" if settings.get("rope_type") is not None else "type"
    rope_type = settings.text(type_field, "default")
    if settings.number("partial_rotary_factor", 1.0) != 1.0:
        raise settings.refuse("partial_rotary_factor", "not supported; must be 1")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type=rope_type, factor=settings.number("factor"))
    if rope_type != "llama3":
        raise settings.refuse(type_field, "not supported; supported are default, linear, llama3")
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=settings.number("factor"),
        low_freq_factor=settings.number("low_freq_factor"),
        high_freq_factor=settings.number("high_freq_factor"),
        original_max_position_embeddings=settings.integer("original_max_position_embeddings"),
    )
