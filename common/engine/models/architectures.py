"""The table of supported architectures: only what differs between them.

All of them are pre-norm decoders with rotary positions, grouped-query attention and a gated MLP, and all name
their tensors alike; a new one that fits this shape is one more row.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one entry of config.json's `architectures` departs from plain Llama."""

    name: str
    #: Biases of the q, k and v and of the output projection; None: as config.json's `attention_bias` says.
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    #: Biases of the MLP; None: as `mlp_bias` says.
    mlp_bias: bool | None = False
    #: RMSNorm over each head of q and k before the rotation.
    qk_norm: bool = False
    #: Head size if config.json has none; None: hidden_size / num_attention_heads.
    default_head_dim: int | None = None
    #: Whether `sliding_window` means anything, what it is if absent, and the flag that must be set for it.
    sliding_window: bool = False
    default_sliding_window: int | None = None
    sliding_window_flag: str | None = None


ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("LlamaForCausalLM", mlp_bias=None),
        Architecture(
            "MistralForCausalLM", qkv_bias=False, output_bias=False, sliding_window=True, default_sliding_window=4096
        ),
        Architecture(
            "Qwen2ForCausalLM",
            qkv_bias=True,
            output_bias=False,
            sliding_window=True,
            default_sliding_window=4096,
            sliding_window_flag="use_sliding_window",
        ),
        Architecture(
            "Qwen3ForCausalLM",
            qk_norm=True,
            default_head_dim=128,
            sliding_window=True,
            default_sliding_window=4096,
            sliding_window_flag="use_sliding_window",
        ),
    )
}
