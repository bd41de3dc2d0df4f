"""`Kernels` on the GPU, in fp32, fp16 or bf16. Knows which kernel serves which operation, not how."""

import torch
from torch import Tensor

from common.engine.batch import Batch
from common.engine.kernels.reference import ReferenceLinear
from common.engine.kernels.triton.decode_attention import decode_attention
from common.engine.kernels.triton.prefill_attention import prefill_attention
from common.engine.kernels.triton.rms_norm import add_rms_norm, rms_norm
from common.engine.kernels.triton.rope_and_store import rope_and_store
from common.engine.kernels.triton.silu_and_mul import silu_and_mul


class TritonKernels:
    """`Kernels` made of Triton kernels; products are the vendor library's, through torch."""

    name = "triton"

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> ReferenceLinear:
        return ReferenceLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

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
        rope_and_store(q, k, v, cos, sin, positions, k_cache, v_cache, slot_mapping)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        """Each kernel passes over the sequences of the other: which is which is known on the device only."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if batch.max_query_len > 1:
            prefill_attention(q, k_cache, v_cache, batch, scale, out)
        if batch.max_query_len == 1 or batch.num_sequences > 1:
            decode_attention(q, k_cache, v_cache, batch, scale, out)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)
