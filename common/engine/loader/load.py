"""Builds a `CausalLM` from a checkpoint, tensor by tensor.

Each fused weight is allocated once in the target dtype, filled straight from the file, and handed to the kernels,
so that at no time more than one weight exists twice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kernels import Kernels, PackedLinear, create_kernels
from common.engine.layers.attention import Attention, AttentionWeights
from common.engine.layers.mlp import GatedMLP
from common.engine.layers.rope import RopeTables, rope_tables
from common.engine.loader.checkpoint import FLOAT_DTYPES, TensorEntry, TensorReader, check_tensor, list_tensors
from common.engine.loader.folder import load_config, read_eos_token_ids
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import CausalLM, DecoderLayer
from common.engine.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, expected_tensors, is_ignorable, layer_prefix
from common.errors import ModelError


def load_model(
    path: Path, *, device: torch.device, dtype: torch.dtype | None, kernels: Kernels | None = None
) -> CausalLM:
    """Load the model in the local folder `path`.

    Args:
        dtype: of weights and activations; None: fp32 on the CPU, else the checkpoint's own.
        kernels: None: the fastest for device and dtype.

    Raises:
        ModelError: the architecture is not supported, or the weights are not those that config.json implies.
    """
    config = load_config(path)
    shapes = expected_tensors(config)
    entries = list_tensors(path)
    check_checkpoint(config, entries, shapes)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else FLOAT_DTYPES[entries[EMBEDDING].dtype]
    with TensorReader(entries) as reader, torch.inference_mode():
        loader = _Loader(reader, shapes, device, dtype, kernels or create_kernels(device, dtype))
        return loader.model(config, read_eos_token_ids(path))


def check_checkpoint(config: ModelConfig, entries: dict[str, TensorEntry], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ModelError naming the first tensors that are missing, left over or mis-shaped."""
    missing = [name for name in shapes if name not in entries]
    if missing:
        raise ModelError(f"the checkpoint lacks {_some(missing)}")
    unexpected = [name for name in entries if name not in shapes and not is_ignorable(name, config)]
    if unexpected:
        raise ModelError(f"the checkpoint holds tensors that {config.architecture} has no use for: {_some(unexpected)}")
    for name, shape in shapes.items():
        check_tensor(name, entries[name], shape)


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class _Loader:
    """Turns checked tensors into layers."""

    def __init__(
        self,
        reader: TensorReader,
        shapes: dict[str, tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self._reader = reader
        self._shapes = shapes
        self._device = device
        self._dtype = dtype
        self._kernels = kernels

    def model(self, config: ModelConfig, eos_token_ids: tuple[int, ...]) -> CausalLM:
        embed, lm_head = self._embedding_and_head(config)
        rope = rope_tables(config.rope, config.head_dim, config.max_length, self._device)
        layers = [self._layer(config, layer_prefix(index), rope) for index in range(config.num_layers)]
        return CausalLM(
            config,
            embed=embed,
            layers=layers,
            final_norm=self._tensor(FINAL_NORM),
            lm_head=lm_head,
            kernels=self._kernels,
            eos_token_ids=eos_token_ids,
        )

    def _embedding_and_head(self, config: ModelConfig) -> tuple[Callable[[Tensor], Tensor], PackedLinear]:
        """Tied, they are one table: the embedding reads the rows of what the kernels have packed."""
        table = self._tensor(EMBEDDING)
        if config.tie_word_embeddings:
            head = self._kernels.pack_linear(table, None)
            return head.rows, head
        return partial(F.embedding, weight=table), self._kernels.pack_linear(self._tensor(LM_HEAD), None)

    def _layer(self, config: ModelConfig, prefix: str, rope: RopeTables) -> DecoderLayer:
        attention = prefix + "self_attn."
        weights = AttentionWeights(
            qkv=self._linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            output=self._linear(attention + "o_proj"),
            q_norm=self._tensor(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=self._tensor(attention + "k_norm.weight") if config.qk_norm else None,
        )
        mlp = prefix + "mlp."
        return DecoderLayer(
            input_norm=self._tensor(prefix + "input_layernorm.weight"),
            post_attention_norm=self._tensor(prefix + "post_attention_layernorm.weight"),
            attention=Attention(config, weights, rope, self._kernels),
            mlp=GatedMLP(
                self._linear(mlp + "gate_proj", mlp + "up_proj"), self._linear(mlp + "down_proj"), self._kernels
            ),
        )

    def _linear(self, *names: str) -> PackedLinear:
        """The projections `names` as one, their outputs side by side."""
        biases = [name + ".bias" for name in names]
        bias = self._tensor(*biases) if biases[0] in self._shapes else None
        return self._kernels.pack_linear(self._tensor(*(name + ".weight" for name in names)), bias)

    def _tensor(self, *names: str) -> Tensor:
        """The tensors `names` stacked along the first dimension, on the target device in the target dtype."""
        sizes = [self._shapes[name][0] for name in names]
        stacked = torch.empty((sum(sizes), *self._shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        end = 0
        for name, size in zip(names, sizes, strict=True):
            self._reader.read_into(name, stacked[end : end + size])
            end += size
        return stacked
