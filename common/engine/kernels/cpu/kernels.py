"""`Kernels` for fp32 on the CPU: checks what the compiled functions take for granted, then calls them.

A row of a batch comes out the same to the last bit whatever else is in the batch, however many rows it has, and
however a prompt was cut into chunks: every sum has one fixed order (see `src/gemm.h` and `src/attention.cpp`).
Results may differ between instruction sets (AVX-512, AVX2, ...), and in the last bits from `ReferenceKernels`.

Threads are OpenMP's, as many as `torch.get_num_threads()` says at the call; the library finds torch's libgomp
already loaded and shares its pool. Set OMP_WAIT_POLICY=passive in the environment before torch is imported wherever
cores are shared, be it by a prefill and a decode worker only: by default a waiting thread spins, and keeps off the
core the very thread that it waits for. Two processes of two threads on two busy cores made 0.7 steps a second each
with the default (or "active"), 5 with GOMP_SPINCOUNT=10000, 72 with 1000, and 75 with "passive".
"""

import ctypes

import torch
from torch import Tensor

from common.engine.batch import Batch
from common.engine.kernels.cpu.compiler import build
from common.engine.kernels.cpu.library import load_library
from common.engine.kernels.cpu.memory import HugePageArena


class CpuLinear:
    """A weight packed into panels, which is both how it streams best and what a blocked product wants."""

    def __init__(self, library: ctypes.CDLL, arena: HugePageArena, weight: Tensor, bias: Tensor | None) -> None:
        require_fp32(weight, *([] if bias is None else [bias]))
        self.out_features, self.in_features = weight.shape
        weight = with_dense_rows(weight)
        self._width = int(library.tandem_panel_width())
        panels = -(-self.out_features // self._width)
        self._packed = arena.take(panels * self._width * self.in_features)
        self._bias = None if bias is None else bias.contiguous()
        self._bias_ptr = None if self._bias is None else self._bias.data_ptr()
        self._packed_ptr = self._packed.data_ptr()
        self._linear = library.tandem_linear
        library.tandem_pack(
            weight.data_ptr(),
            weight.stride(0),
            self.out_features,
            self.in_features,
            self._packed_ptr,
            torch.get_num_threads(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dim() == 2 and x.shape[1] == self.in_features, f"x is {tuple(x.shape)}, weight has {self.in_features}"
        require_fp32(x)
        x = with_dense_rows(x)
        out = torch.empty(x.shape[0], self.out_features)
        self._linear(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._packed_ptr,
            self._bias_ptr,
            self.out_features,
            self.in_features,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rows(self, indices: Tensor) -> Tensor:
        # A row's neighbours lie a panel's width apart. That is about ten times slower than plain rows, and less than
        # 0.5 % of a step of the demo model: 10 us for one token, 30 ms for 2048.
        panels = self._packed.view(-1, self.in_features, self._width)
        return panels[indices // self._width, :, indices % self._width].contiguous()


class CpuKernels:
    """`Kernels` in native code, fp32 only.

    Raises:
        BuildError: the machine has no working C++ compiler.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._library = load_library(build())
        self._arena = HugePageArena()

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        return CpuLinear(self._library, self._arena, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        require_fp32(x, weight)
        rows = with_dense_rows(x.reshape(-1, x.shape[-1]))
        out = torch.empty(x.shape)
        self._library.tandem_rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            rows.shape[0],
            rows.shape[1],
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        require_fp32(x, residual, weight)
        x, residual = x.contiguous(), residual.contiguous()
        assert x.shape == residual.shape and x.data_ptr() != residual.data_ptr(), "x and residual must be two tensors"
        self._library.tandem_add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            x.numel() // x.shape[-1],
            x.shape[-1],
            torch.get_num_threads(),
        )
        return x, residual

    def rope_and_store(
        self,
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
        require_fp32(q, k, v, cos, sin, k_cache, v_cache)
        require_heads(q, k, v)
        require_pages(k_cache, v_cache)
        num_tokens, num_heads, head_dim = q.shape
        assert cos.is_contiguous() and sin.is_contiguous() and cos.shape[1] * 2 == head_dim, "cos, sin: [P, D / 2]"
        self._library.tandem_rope_and_store(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
            slot_mapping.data_ptr(),
            num_tokens,
            num_heads,
            k.shape[1],
            head_dim,
            k_cache.shape[1],
            torch.get_num_threads(),
        )

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        require_fp32(q, k_cache, v_cache)
        require_heads(q)
        require_pages(k_cache, v_cache)
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(num_tokens, num_heads, head_dim)
        self._library.tandem_paged_attention(
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.cu_seqlens_q.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.num_sequences,
            num_heads,
            k_cache.shape[2],
            head_dim,
            k_cache.shape[1],
            scale,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        require_fp32(gate_up)
        gate_up = gate_up.contiguous()
        num_tokens, width = gate_up.shape
        out = torch.empty(num_tokens, width // 2)
        self._library.tandem_silu_and_mul(
            gate_up.data_ptr(), out.data_ptr(), num_tokens, width // 2, torch.get_num_threads()
        )
        return out


def require_fp32(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype is torch.float32, f"the native CPU kernels take float32, not {tensor.dtype}"


def with_dense_rows(x: Tensor) -> Tensor:
    """x [rows, n] itself if the elements of a row are neighbours, else a copy where they are."""
    return x if x.stride(1) == 1 else x.contiguous()


def require_heads(*tensors: Tensor) -> None:
    """[T, heads, D]; tokens may be apart, as when q, k and v are slices of one projection."""
    for x in tensors:
        strides = x.stride()
        assert strides[2] == 1 and strides[1] == x.shape[2], f"heads of a token must be dense, strides {strides}"


def require_pages(k_cache: Tensor, v_cache: Tensor) -> None:
    """[num_blocks, B, G, D]; blocks may be apart, equally in both."""
    shape, strides = k_cache.shape, k_cache.stride()
    assert shape == v_cache.shape and strides == v_cache.stride(), "k and v pages differ in form"
    # Twice a layer: the comparison of numbers spares a view of a block in nearly all cases.
    dense = strides[1:] == (shape[2] * shape[3], shape[3], 1) or k_cache[0].is_contiguous()
    assert dense, f"a block must be dense, strides {strides}"
