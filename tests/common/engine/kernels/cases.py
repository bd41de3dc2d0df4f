"""Inputs for kernels: pages filled by mixed batches of chunks, and nothing but NaN where no kernel may look."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from common.engine.batch import Batch, SequenceChunk, build_batch

#: (query heads, kv heads)
HEADS = ((9, 3), (8, 8), (4, 1))
HEAD_DIMS = (32, 64, 80, 96, 128)
BLOCK_SIZES = (8, 16, 32)

#: Every (heads, head dim) with one of the block sizes.
SHAPES = [
    (heads, head_dim, BLOCK_SIZES[(i + j) % 3]) for i, heads in enumerate(HEADS) for j, head_dim in enumerate(HEAD_DIMS)
]


def mixed_lengths(block_size: int) -> list[tuple[int, int]]:
    """(start, tokens) of chunks: contexts of 1, k blocks and k blocks ± 1, and of both sides of a kernel's tile."""
    k = 3 * block_size
    decodes = [(0, 1), (k - 2, 1), (k - 1, 1), (k, 1), (126, 1), (127, 1), (128, 1), (299, 1)]
    prefills = [(0, k - 1), (0, k), (0, k + 1), (k, block_size), (120, 17), (5, 2), (100, 190)]
    return [chunk for pair in zip(decodes, [*prefills, (3, 1)], strict=True) for chunk in pair]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of paged attention, and what is needed to repeat parts of it."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    chunks: Sequence[SequenceChunk]

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    @property
    def batch(self) -> Batch:
        return build_batch(self.chunks, self.block_size, self.q.device)

    def context(self, cache: Tensor, chunk: SequenceChunk) -> Tensor:
        """K or V of the chunk's positions [0, end): [end, G, D]."""
        return torch.cat([cache[block] for block in chunk.block_table])[: chunk.end]

    def rows(self) -> list[slice]:
        """Which rows of q are each chunk's."""
        ends = self.batch.cu_seqlens_q.tolist()
        return [slice(a, b) for a, b in pairwise(ends)]


def make_attention_case(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    lengths: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> AttentionCase:
    """Sequences of `lengths` (start, tokens) in shuffled blocks; all other slots hold NaN."""
    generator = torch.Generator().manual_seed(head_dim * block_size + heads[0])
    counts = [-(-(start + tokens) // block_size) for start, tokens in lengths]
    blocks = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())  # block 0 belongs to nobody
    caches = torch.full((2, sum(counts) + 1, block_size, heads[1], head_dim), float("nan"))
    chunks = []
    for (start, tokens), count in zip(lengths, counts, strict=True):
        table = [next(blocks) for _ in range(count)]
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(start + tokens)])
        caches.flatten(1, 2)[:, slots] = torch.randn(2, len(slots), heads[1], head_dim, generator=generator)
        chunks.append(SequenceChunk([0] * tokens, start, table, True))
    q = torch.randn(sum(tokens for _, tokens in lengths), heads[0], head_dim, generator=generator)
    k_cache, v_cache = caches.to(device, dtype)
    return AttentionCase(q.to(device, dtype), k_cache, v_cache, chunks)


@dataclass(slots=True)
class RopeCase:
    """Arguments of `rope_and_store`, with q, k and v slices of one projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.q,
            self.k,
            self.v,
            self.cos,
            self.sin,
            self.positions,
            self.k_cache,
            self.v_cache,
            self.slot_mapping,
        )

    def outputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.k_cache, self.v_cache


def make_rope_case(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> RopeCase:
    """The same tensors whenever called with the same arguments."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_heads, num_kv_heads = heads
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(device, dtype)
    q, k, v = (
        part.unflatten(1, (-1, head_dim))
        for part in qkv.split([heads[0] * head_dim, heads[1] * head_dim, heads[1] * head_dim], dim=1)
    )
    angles = torch.rand(500, head_dim // 2, generator=generator) * 6.3
    num_blocks = num_tokens // block_size + 3
    # The two of a layer share blocks, as when both lie side by side in memory: blocks are apart.
    pages = torch.zeros(num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    return RopeCase(
        q,
        k,
        v,
        angles.cos().to(device),
        angles.sin().to(device),
        torch.randint(0, 500, (num_tokens,), generator=generator).to(device),
        pages[:, 0],
        pages[:, 1],
        torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(device),
    )
