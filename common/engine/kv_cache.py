"""The paged KV cache: one tensor for all layers, and how many blocks of it fit into memory.

Which block belongs to whom is the block pool's business.
"""

import contextlib
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.config import ModelConfig
from common.errors import ConfigError

#: Below this nothing can be scheduled: one block to grow into beside the one in use.
MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    #: Tokens per block.
    block_size: int
    num_blocks: int

    @classmethod
    def for_model(cls, config: ModelConfig, *, dtype: torch.dtype, block_size: int, num_blocks: int) -> "KVSpec":
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, dtype, block_size, num_blocks)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """One block in all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """[num_layers, K | V, num_blocks, block_size, num_kv_heads, head_dim]."""
        return (self.num_layers, 2, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)


class KVCache:
    """The pages of all layers.

    Attributes:
        data: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], contiguous, at first zeros.
    """

    def __init__(self, spec: KVSpec, device: torch.device) -> None:
        self.spec = spec
        self.data = _allocate(spec, device)
        self.device = self.data.device
        self._layers = [(layer[0], layer[1]) for layer in self.data]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Views (k, v) of one layer's pages, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._layers[index]

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers, for a sequence that goes its own way from a partly filled block."""
        assert 0 <= source < self.spec.num_blocks and 0 <= target < self.spec.num_blocks, (source, target)
        self.data[:, :, target].copy_(self.data[:, :, source])


def num_blocks_for(memory_bytes: int, spec: KVSpec) -> int:
    """How many blocks of `spec`'s shape (its own `num_blocks` does not matter) fit into `memory_bytes`.

    Raises:
        ConfigError: fewer than `MIN_BLOCKS` fit.
    """
    num_blocks = memory_bytes // spec.bytes_per_block
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{max(memory_bytes, 0):,} bytes of KV cache hold {max(num_blocks, 0)} blocks of {spec.block_size} tokens "
            f"({spec.bytes_per_block:,} bytes each); at least {MIN_BLOCKS} are needed",
            field="kv_memory",
        )
    return num_blocks


def _allocate(spec: KVSpec, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    # Huge pages raise the bandwidth of reading the cache by some 40 %. The kernel hands the pages out, zeroed, on
    # first touch; the mapping lives as long as a tensor over it.
    memory = mmap.mmap(-1, spec.num_blocks * spec.bytes_per_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # only advice; a kernel built without huge pages refuses it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=spec.dtype).view(spec.shape)
