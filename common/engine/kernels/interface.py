"""What a model needs from kernels; `reference`, `cpu` and `triton` each implement it.

All tensors of one call share a device and a floating dtype unless said otherwise; outputs are new tensors
unless a name ends in `_inplace`. T tokens, S sequences, H query heads, G kv heads (H % G == 0), D head dim,
B block size. One layer's pages: k_cache, v_cache [num_blocks, B, G, D].
"""

from typing import Protocol

from torch import Tensor

from common.engine.batch import Batch


class PackedLinear(Protocol):
    """A weight in whatever form the kernels multiply fastest; made once at load."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        ...

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` (int64 [T], each in [0, out)) of the weight as it was given: a new tensor [T, in].

        So that a table which is multiplied by and read from, as tied embeddings are, is held once.
        """
        ...


class Kernels(Protocol):
    """The operations that differ by device. Stateless: all state is in the arguments."""

    name: str

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Take over `weight` [out, in] (and `bias` [out]); the caller keeps no other copy."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension: x [..., hidden], weight [hidden]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """s = x + residual; returns (rms_norm(s), s). May reuse the memory of both arguments."""
        ...

    def rope_and_store(
        self,
        q: Tensor,  # [T, H, D], rotated in place
        k: Tensor,  # [T, G, D], rotated in place
        v: Tensor,  # [T, G, D]
        cos: Tensor,  # [max positions, D / 2] fp32
        sin: Tensor,  # [max positions, D / 2] fp32
        positions: Tensor,  # int64 [T]
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,  # int64 [T]
    ) -> None:
        """Rotate q and k (halves convention: x1, x2 = split(x)) and write k and v into their slots."""
        ...

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        """Causal attention of each chunk over its sequence's pages (own tokens included).

        q [T, H, D] -> [T, H, D]. Token t of a chunk at position p attends to positions [0, p].
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * I] -> [T, I]: silu(first half) * second half."""
        ...
