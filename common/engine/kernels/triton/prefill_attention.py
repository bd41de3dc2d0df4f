"""Causal attention of chunks over their sequences' pages, the chunks' own tokens included."""

import triton
import triton.language as tl
from torch import Tensor

from common.engine.batch import Batch
from common.engine.kernels.triton.paged_tile import LOG2E, attend_tile, check_attention, is_interpreted


# Grid: [ceil(longest chunk * R / BLOCK_M), G, S]. A program does BLOCK_M query rows of one kv head, where a row is
# (token, head of the group): row = token * R + head. So keys and values are read once for all heads that share them.
@triton.jit
def prefill_attention_kernel(
    q,  # [T, H, D], tokens q_stride apart
    k_cache,  # [num_blocks, B, G, D], blocks cache_stride apart
    v_cache,
    block_tables,  # int32 [S, table_width]
    cu_seqlens_q,  # int32 [S + 1]
    seq_lens,  # int32 [S]
    out,  # [T, H, D] contiguous
    q_stride,
    cache_stride,
    table_width,
    scale,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # The last blocks of a chunk see the most context: start with them.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    g, s = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk_start = tl.load(cu_seqlens_q + s)
    chunk_len = tl.load(cu_seqlens_q + s + 1) - chunk_start
    if chunk_len == 1 or block * BLOCK_M >= chunk_len * R:  # one token: the decode kernel's
        return
    seq_len = tl.load(seq_lens + s)

    row, dim = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token, head = row // R, g * R + row % R
    inside = (token < chunk_len)[:, None] & (dim < D)[None, :]
    absolute = (chunk_start + token).to(tl.int64)
    query_at = absolute[:, None] * q_stride + head[:, None] * D + dim[None, :]
    query = tl.load(q + query_at, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    if WIDEN:
        query = query.to(tl.float32)
    q_positions = seq_len - chunk_len + token
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_tables + s * table_width
    last_token = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // R, chunk_len - 1)
    end = seq_len - chunk_len + last_token + 1
    for tile in range(0, end, BLOCK_N):
        top, total, acc = attend_tile(
            query, q_positions, top, total, acc, k_cache + g * D, v_cache + g * D, table, tile, end, scale,
            cache_stride, G, D, B, BLOCK_N, BLOCK_D, WIDEN,
        )  # fmt: skip
    out_at = absolute[:, None] * (G * R * D) + head[:, None] * D + dim[None, :]
    tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def prefill_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, out: Tensor) -> None:
    """Fills the rows of `out` [T, H, D] that belong to chunks longer than one token; others are left alone."""
    check_attention(q, k_cache, v_cache)
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    group = num_heads // num_kv_heads
    block_d = max(triton.next_power_of_2(head_dim), 16)
    wide = q.element_size() == 4 or block_d > 128  # less fits into shared memory
    block_m = 64
    prefill_attention_kernel[(triton.cdiv(batch.max_query_len * group, block_m), num_kv_heads, batch.num_sequences)](
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        out,
        q.stride(0),
        k_cache.stride(0),
        batch.block_tables.stride(0),
        scale * LOG2E,
        G=num_kv_heads,
        R=group,
        D=head_dim,
        B=block_size,
        BLOCK_M=block_m,
        BLOCK_N=32 if wide else 64,
        BLOCK_D=block_d,
        WIDEN=is_interpreted(),
        num_warps=4,
        num_stages=2,
    )
