"""RMSNorm, with or without the residual addition before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor


# Grid: [rows]. A program normalises one row.
@triton.jit
def rms_norm_kernel(
    x,  # [rows, N], rows x_stride apart
    residual,  # [rows, N] contiguous, becomes x + residual; read only if ADD
    weight,  # [N]
    out,  # [rows, N] contiguous
    x_stride,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,  # N rounded up to a power of two
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    dtype = out.dtype.element_ty  # results are rounded where torch rounds them, and computed in fp32
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = value + tl.load(residual + row * N + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * N + at, value.to(dtype), mask=inside)
        value = value.to(dtype).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / N + eps)
    normed = (value * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, (normed * factor).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(rows, rows, weight, eps, out, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., N] -> (norm of the sum, sum), in the memory of x and residual where they are contiguous."""
    x, residual = x.contiguous(), residual.contiguous()
    assert x.shape == residual.shape and x.data_ptr() != residual.data_ptr(), "x and residual must be two tensors"
    launch(x.view(-1, x.shape[-1]), residual, weight, eps, x, add=True)
    return x, residual


def launch(rows: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, *, add: bool) -> None:
    count, width = rows.shape
    assert weight.is_contiguous() and weight.shape == (width,), f"weight {tuple(weight.shape)} for rows of {width}"
    assert rows.dtype == weight.dtype == residual.dtype, "x, residual and weight differ in dtype"
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(count,)](
        rows,
        residual,
        weight,
        out,
        rows.stride(0),
        eps,
        N=width,
        BLOCK=block,
        ADD=add,
        num_warps=min(max(block // 512, 1), 8),
    )
