"""Rotary embedding of q and k in place, and the write of k and v into their slots, in one launch."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_heads(
    x,  # first head of one token: [heads, D], dense
    cos,  # [BLOCK_HALF] fp32
    sin,
    heads,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotates in place; returns both halves, their offsets in the token, and which of them exist."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < heads) & (half < D // 2)
    at = head * D + half
    x1 = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    y1 = (x1 * cos[None, :] - x2 * sin[None, :]).to(x.dtype.element_ty)
    y2 = (x2 * cos[None, :] + x1 * sin[None, :]).to(x.dtype.element_ty)
    tl.store(x + at, y1, mask=inside)
    tl.store(x + at + D // 2, y2, mask=inside)
    return y1, y2, at, inside


# Grid: [T]. A program does all heads of one token.
@triton.jit
def rope_and_store_kernel(
    q,  # [T, H, D], tokens q_stride apart
    k,  # [T, G, D]
    v,  # [T, G, D]
    cos,  # [positions, D / 2] fp32
    sin,
    positions,  # int64 [T]
    k_cache,  # [num_blocks, B, G, D], blocks cache_stride apart
    v_cache,
    slots,  # int64 [T]
    q_stride,
    k_stride,
    v_stride,
    cache_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    angle = tl.load(positions + token) * (D // 2) + half
    c = tl.load(cos + angle, mask=half < D // 2, other=0.0)
    s = tl.load(sin + angle, mask=half < D // 2, other=0.0)
    rotate_heads(q + token * q_stride, c, s, H, D, BLOCK_H, BLOCK_HALF)
    k1, k2, at, inside = rotate_heads(k + token * k_stride, c, s, G, D, BLOCK_G, BLOCK_HALF)

    slot = tl.load(slots + token)
    row = (slot // B) * cache_stride + (slot % B) * G * D
    tl.store(k_cache + row + at, k1, mask=inside)
    tl.store(k_cache + row + at + D // 2, k2, mask=inside)
    v1 = tl.load(v + token * v_stride + at, mask=inside)
    v2 = tl.load(v + token * v_stride + at + D // 2, mask=inside)
    tl.store(v_cache + row + at, v1, mask=inside)
    tl.store(v_cache + row + at + D // 2, v2, mask=inside)


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """See `Kernels.rope_and_store`; tokens of q, k and v may be apart, the heads of one must be dense."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k.shape[1], k_cache.shape[1]
    for x in (q, k, v):
        assert x.stride(2) == 1 and x.stride(1) == head_dim, f"heads of a token must be dense, strides {x.stride()}"
    assert k_cache.stride() == v_cache.stride() and k_cache[0].is_contiguous(), "a block of pages must be dense"
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape[1] * 2 == head_dim, "cos, sin: [P, D / 2]"
    rope_and_store_kernel[(tokens,)](
        q,
        k,
        v,
        cos,
        sin,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        H=num_heads,
        G=num_kv_heads,
        D=head_dim,
        B=block_size,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_G=triton.next_power_of_2(num_kv_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
    )
