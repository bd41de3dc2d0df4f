"""Attention of one new token a sequence over its pages, in two phases.

The context is cut into splits of a fixed length, so that a long one occupies the whole GPU and a sequence's result
does not depend on its batch. Phase 1 reduces each split to (log-sum-exp, normalised values) per query head; phase 2
merges the splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.batch import Batch
from common.engine.kernels.triton.paged_tile import LOG2E, attend_tile, check_attention, is_interpreted

SPLIT = 512  # positions of a split


# Grid: [S, G, splits]. A program reduces one split for the R query heads of one kv head.
@triton.jit
def decode_split_kernel(
    q,  # [T, H, D], tokens q_stride apart
    k_cache,  # [num_blocks, B, G, D], blocks cache_stride apart
    v_cache,
    block_tables,  # int32 [S, table_width]
    cu_seqlens_q,  # int32 [S + 1]
    seq_lens,  # int32 [S]
    values,  # fp32 [S, H, splits, D]: attention within the split
    lse,  # fp32 [S, H, splits]: log2 of the split's sum of exponentials
    q_stride,
    cache_stride,
    table_width,
    splits,
    scale,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,  # R rounded up to what a tensor core takes
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    s, g, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_seqlens_q + s)
    seq_len = tl.load(seq_lens + s)
    first = split * SPLIT
    if tl.load(cu_seqlens_q + s + 1) - token != 1 or first >= seq_len:
        return
    end = tl.minimum(first + SPLIT, seq_len)

    r, dim = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    inside = (r < R)[:, None] & (dim < D)[None, :]
    query_at = token.to(tl.int64) * q_stride + (g * R + r)[:, None] * D + dim[None, :]
    query = tl.load(q + query_at, mask=inside, other=0.0)  # [BLOCK_R, BLOCK_D]
    if WIDEN:
        query = query.to(tl.float32)
    q_positions = tl.full([BLOCK_R], 0, tl.int32) + (end - 1)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    table = block_tables + s * table_width
    for tile in range(first, end, BLOCK_N):
        top, total, acc = attend_tile(
            query, q_positions, top, total, acc, k_cache + g * D, v_cache + g * D, table, tile, end, scale,
            cache_stride, G, D, B, BLOCK_N, BLOCK_D, WIDEN,
        )  # fmt: skip

    slot = ((s * G + g) * R + r) * splits + split  # [BLOCK_R]
    tl.store(lse + slot, top + tl.log2(total), mask=r < R)
    tl.store(values + slot[:, None] * D + dim[None, :], acc / total[:, None], mask=inside)


# Grid: [S, H]. A program merges the splits of one query head.
@triton.jit
def decode_merge_kernel(
    values,  # fp32 [S, H, splits, D]
    lse,  # fp32 [S, H, splits]
    cu_seqlens_q,  # int32 [S + 1]
    seq_lens,  # int32 [S]
    out,  # [T, H, D] contiguous
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    s, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(cu_seqlens_q + s)
    if tl.load(cu_seqlens_q + s + 1) - token != 1:
        return
    dim = tl.arange(0, BLOCK_D)
    slot = (s * H + h) * splits
    top = tl.load(lse + slot)
    total = top * 0.0 + 1.0
    acc = tl.load(values + slot * D + dim, mask=dim < D, other=0.0)
    for split in range(1, tl.cdiv(tl.load(seq_lens + s), SPLIT)):
        split_lse = tl.load(lse + slot + split)
        new_top = tl.maximum(top, split_lse)
        keep, add = tl.exp2(top - new_top), tl.exp2(split_lse - new_top)
        value = tl.load(values + (slot + split) * D + dim, mask=dim < D, other=0.0)
        acc = acc * keep + value * add
        total = total * keep + add
        top = new_top
    at = (token.to(tl.int64) * H + h) * D + dim
    tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=dim < D)


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, out: Tensor) -> None:
    """Fills the rows of `out` [T, H, D] that belong to one-token chunks, from q [T, H, D]; others are left alone."""
    check_attention(q, k_cache, v_cache)
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    splits = triton.cdiv(batch.max_seq_len, SPLIT)
    values = torch.empty((batch.num_sequences, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch.num_sequences, num_heads, splits), dtype=torch.float32, device=q.device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    group = num_heads // num_kv_heads
    decode_split_kernel[(batch.num_sequences, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        values,
        lse,
        q.stride(0),
        k_cache.stride(0),
        batch.block_tables.stride(0),
        splits,
        scale * LOG2E,
        G=num_kv_heads,
        R=group,
        D=head_dim,
        B=block_size,
        SPLIT=SPLIT,
        BLOCK_R=max(triton.next_power_of_2(group), 16),
        BLOCK_N=64 if block_d <= 128 else 32,
        BLOCK_D=block_d,
        WIDEN=is_interpreted(),
        num_warps=4,
        num_stages=2,
    )
    decode_merge_kernel[(batch.num_sequences, num_heads)](
        values,
        lse,
        batch.cu_seqlens_q,
        batch.seq_lens,
        out,
        splits,
        H=num_heads,
        D=head_dim,
        SPLIT=SPLIT,
        BLOCK_D=block_d,
        num_warps=2,
    )
