"""The plain PyTorch kernels against what PyTorch itself says, or the formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kernels.reference import ReferenceKernels
from tests.common.engine.kernels.cases import (
    SHAPES,
    AttentionCase,
    make_attention_case,
    make_rope_case,
    mixed_lengths,
)

kernels = ReferenceKernels()


def sdpa_by_sequence(case: AttentionCase) -> Tensor:
    outputs = []
    for chunk, rows in zip(case.chunks, case.rows(), strict=True):
        k, v = (case.context(cache, chunk).transpose(0, 1) for cache in (case.k_cache, case.v_cache))  # [G, end, D]
        mask = torch.arange(chunk.end) <= torch.arange(chunk.start, chunk.end)[:, None]
        q = case.q[rows].transpose(0, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES)
def test_attention_equals_sdpa(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    case = make_attention_case(heads, head_dim, block_size, mixed_lengths(block_size))
    out = kernels.paged_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    torch.testing.assert_close(out, sdpa_by_sequence(case), atol=2e-5, rtol=1e-4)


def test_attention_of_half_precision_accumulates_in_fp32() -> None:
    case = make_attention_case((9, 3), 64, 16, mixed_lengths(16), torch.float16)
    out = kernels.paged_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    wide = AttentionCase(case.q.float(), case.k_cache.float(), case.v_cache.float(), case.chunks)
    assert out.dtype is torch.float16
    torch.testing.assert_close(out, sdpa_by_sequence(wide).half())


def test_linear_and_its_bias() -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(7, 5), torch.randn(7)
    torch.testing.assert_close(kernels.pack_linear(weight, None)(x), x @ weight.T)
    torch.testing.assert_close(kernels.pack_linear(weight, bias)(x), x @ weight.T + bias)


def test_norms_equal_torchs() -> None:
    x, residual, weight = torch.randn(4, 30), torch.randn(4, 30), torch.randn(30)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), F.rms_norm(x, (30,), weight, 1e-5))
    expected = F.rms_norm(x + residual, (30,), weight, 1e-5), x + residual
    torch.testing.assert_close(kernels.add_rms_norm(x, residual, weight, 1e-5), expected)


def test_norm_of_half_precision_survives_large_values() -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)  # whose square is not a float16
    assert kernels.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 8]


def test_gated_activation() -> None:
    gate, up = torch.randn(3, 10), torch.randn(3, 10)
    torch.testing.assert_close(kernels.silu_and_mul(torch.cat((gate, up), dim=1)), F.silu(gate) * up)


def test_rope_turns_pairs_and_stores_them() -> None:
    case = make_rope_case((4, 2), 16, 8, 13)
    q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
    kernels.rope_and_store(*case.arguments())

    turn = torch.complex(case.cos, case.sin)[case.positions][:, None]
    for before, after in ((q, case.q), (k, case.k)):
        turned = torch.complex(*before.chunk(2, dim=-1)) * turn
        torch.testing.assert_close(after, torch.cat((turned.real, turned.imag), dim=-1))
    assert torch.equal(case.v, v)
    for cache, stored in ((case.k_cache, case.k), (case.v_cache, v)):
        assert torch.equal(cache[case.slot_mapping // 8, case.slot_mapping % 8], stored)
        assert cache.count_nonzero() == stored.count_nonzero(), "something else was written"
