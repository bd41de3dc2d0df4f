"""The gated activation of the MLP: silu(gate) * up."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


# Grid: [T, ceil(N / BLOCK)].
@triton.jit
def silu_and_mul_kernel(
    gate_up,  # [T, 2 * N], rows `stride` apart: gate, then up
    out,  # [T, N] contiguous
    stride,
    N,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded where torch rounds it
    tl.store(out + row * N + at, (activated * up).to(dtype), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * N] -> [T, N]."""
    assert gate_up.stride(1) == 1, f"rows must be dense, strides {gate_up.stride()}"
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    silu_and_mul_kernel[(tokens, triton.cdiv(width, BLOCK))](gate_up, out, gate_up.stride(0), width, BLOCK=BLOCK)
    return out
