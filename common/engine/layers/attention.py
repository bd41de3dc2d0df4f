"""Grouped-query attention over paged KV, in two halves: store the new K and V, then attend.

The halves are apart because a layer's KV is final after the first, and may be sent away while the second runs.
"""

from dataclasses import dataclass

from torch import Tensor

from common.engine.batch import Batch
from common.engine.kernels.interface import Kernels, PackedLinear
from common.engine.layers.rope import RopeTables
from common.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's attention; H query heads, G kv heads, D head dim."""

    #: hidden -> (H + 2 G) * D: q, then k, then v.
    qkv: PackedLinear
    #: H * D -> hidden.
    output: PackedLinear
    #: [D] each, for architectures that normalise the heads of q and k.
    q_norm: Tensor | None
    k_norm: Tensor | None


class Attention:
    """One layer's attention; holds weights, no state."""

    def __init__(self, config: ModelConfig, weights: AttentionWeights, rope: RopeTables, kernels: Kernels) -> None:
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._eps = config.rms_norm_eps
        self._weights = weights
        self._rope = rope
        self._kernels = kernels

    def store(self, x: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Project x [T, hidden], write the rotated K and the V of all tokens into their slots; returns q [T, H, D]."""
        weights, kernels = self._weights, self._kernels
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        heads = weights.qkv(x).view(x.shape[0], num_heads + 2 * num_kv_heads, self._head_dim)
        # Views: the D values of a head are contiguous, tokens are strided.
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = kernels.rms_norm(q, weights.q_norm, self._eps)
            k = kernels.rms_norm(k, weights.k_norm, self._eps)
        kernels.rope_and_store(
            q, k, v, self._rope.cos, self._rope.sin, batch.positions, k_cache, v_cache, batch.slot_mapping
        )
        return q

    def attend(self, q: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [T, H, D] of the batch's tokens over their sequences' pages: [T, hidden]."""
        attended = self._kernels.paged_attention(q, k_cache, v_cache, batch, self._scale)
        return self._weights.output(attended.flatten(1))
