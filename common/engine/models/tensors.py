"""Which tensors a checkpoint of a model must hold: Hugging Face names and shapes, derived from its config."""

from common.engine.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape, in the order in which they are loaded."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in _layer_tensors(config).items()}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold `name` although the model has no use for it.

    Old Llama checkpoints carry the rotary frequencies, and some with tied embeddings a copy of them.
    """
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == LM_HEAD)


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    for name, shape, bias in (
        ("self_attn.q_proj", (heads, hidden), config.qkv_bias),
        ("self_attn.k_proj", (kv_heads, hidden), config.qkv_bias),
        ("self_attn.v_proj", (kv_heads, hidden), config.qkv_bias),
        ("self_attn.o_proj", (hidden, heads), config.output_bias),
        ("mlp.gate_proj", (inner, hidden), config.mlp_bias),
        ("mlp.up_proj", (inner, hidden), config.mlp_bias),
        ("mlp.down_proj", (hidden, inner), config.mlp_bias),
    ):
        shapes[name + ".weight"] = shape
        if bias:
            shapes[name + ".bias"] = shape[:1]
    return shapes
