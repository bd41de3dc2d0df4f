"""One tile of keys against a block of query rows: the step that both attention kernels repeat."""

import triton
import triton.language as tl
from torch import Tensor

LOG2E: float = 1.4426950408889634


@triton.jit
def attend_tile(
    q,  # [M, BLOCK_D]
    q_positions,  # [M]: a row sees positions up to its own
    top,  # [M] fp32: running maximum of the scores, in powers of two
    total,  # [M] fp32: running sum of 2^(score - top)
    acc,  # [M, BLOCK_D] fp32: running sum of 2^(score - top) * value
    k_cache,  # [num_blocks, B, G, D], at the kv head
    v_cache,
    table,  # this sequence's blocks
    first,  # first position of the tile
    end,  # positions from here on do not exist
    scale,  # softmax scale * log2(e)
    cache_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in fp32: the interpreter's product of bf16 is wrong
):
    at = first + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    block = tl.load(table + at // B, mask=at < end, other=0).to(tl.int64)
    row = block * cache_stride + (at % B) * (G * D)  # [N]
    inside = (at < end)[:, None] & (dim < D)[None, :]
    # Past the end a page may hold anything, NaN too: load zeros there.
    k = tl.load(k_cache + row[:, None] + dim[None, :], mask=inside, other=0.0)  # [N, BLOCK_D]
    v = tl.load(v_cache + row[:, None] + dim[None, :], mask=inside, other=0.0)
    if WIDEN:
        k = k.to(tl.float32)
        v = v.to(tl.float32)

    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, N]
    scores = tl.where(at[None, :] <= q_positions[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen nothing yet keeps -inf; subtracting 0 instead avoids inf - inf.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - shift)
    p = tl.exp2(scores - shift[:, None])
    total = total * keep + tl.sum(p, axis=1)
    acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


def check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """What both kernels take for granted."""
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2], f"heads of a token must be dense, strides {q.stride()}"
    assert k_cache.stride() == v_cache.stride() and k_cache[0].is_contiguous(), "a block of pages must be dense"
    assert q.dtype == k_cache.dtype == v_cache.dtype, f"q is {q.dtype}, pages are {k_cache.dtype}"
    assert q.shape[1] % k_cache.shape[2] == 0, f"{q.shape[1]} heads over {k_cache.shape[2]} kv heads"


def is_interpreted() -> bool:
    """Whether kernels run in triton's interpreter (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)
