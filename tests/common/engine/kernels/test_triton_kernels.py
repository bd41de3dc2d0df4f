"""The Triton kernels against the reference: on a GPU if there is one, else in triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from common.engine.kernels.reference import ReferenceKernels
from common.engine.kernels.triton import TritonKernels
from tests.common.engine.kernels.cases import HEADS, AttentionCase, make_attention_case, make_rope_case

reference = ReferenceKernels()
kernels = TritonKernels()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: dtype and the tolerances of one rounding to it.
PRECISIONS = (
    (torch.float32, 2e-5, 1e-4),
    (torch.float16, 2e-3, 2e-3),
    (torch.bfloat16, 2e-2, 2e-2),
)
PRECISION = pytest.mark.parametrize(("dtype", "atol", "rtol"), PRECISIONS, ids=["fp32", "fp16", "bf16"])


@PRECISION
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [((9, 3), 64, 16), ((4, 1), 80, 8), ((2, 2), 32, 32)])
def test_mixed_attention_equals_the_reference(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    lengths = [(0, 1), (block_size - 1, 1), (0, 2 * block_size), (block_size, 1), (700, 1), (3, 50), (2, 2)]
    case = make_attention_case(heads, head_dim, block_size, lengths, dtype, DEVICE)
    arguments = case.k_cache, case.v_cache, case.batch, case.scale
    out = kernels.paged_attention(case.q, *arguments)
    torch.testing.assert_close(out, reference.paged_attention(case.q, *arguments), atol=atol, rtol=rtol)


@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize("lengths", [[(511, 1), (512, 1), (0, 1)], [(30, 40)]], ids=["decodes", "prefill"])
def test_attention_of_one_kind_equals_the_reference(head_dim: int, lengths: list[tuple[int, int]]) -> None:
    case = make_attention_case((4, 2), head_dim, 16, lengths, device=DEVICE)
    arguments = case.k_cache, case.v_cache, case.batch, case.scale
    out = kernels.paged_attention(case.q, *arguments)
    torch.testing.assert_close(out, reference.paged_attention(case.q, *arguments), atol=2e-5, rtol=1e-4)


def test_a_decode_has_the_same_bits_alone_and_in_a_batch() -> None:
    case = make_attention_case((4, 2), 32, 16, [(700, 1), (10, 1), (1200, 1)], device=DEVICE)
    together = kernels.paged_attention(case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    for i, chunk in enumerate(case.chunks):
        single = AttentionCase(case.q[i : i + 1], case.k_cache, case.v_cache, [chunk])
        out = kernels.paged_attention(single.q, single.k_cache, single.v_cache, single.batch, single.scale)
        assert torch.equal(out, together[i : i + 1])


@PRECISION
@pytest.mark.parametrize("width", [7, 64, 576])
def test_norms_and_activation_equal_the_reference(width: int, dtype: torch.dtype, atol: float, rtol: float) -> None:
    x, residual, gate_up = (torch.randn(3, n, device=DEVICE).to(dtype) for n in (width, width, 2 * width))
    weight = torch.randn(width, device=DEVICE).to(dtype)
    close = {"atol": atol, "rtol": rtol}
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **close)
    torch.testing.assert_close(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), **close)
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected, **close)


def test_activation_wider_than_a_block() -> None:
    gate_up = torch.randn(2, 2 * 1536, device=DEVICE)
    torch.testing.assert_close(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def test_norm_of_heads_of_a_projection() -> None:
    heads, weight = torch.randn(2, 400)[:, 100:228].unflatten(1, (4, 32)).to(DEVICE), torch.randn(32, device=DEVICE)
    torch.testing.assert_close(kernels.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@PRECISION
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rope_and_store_equals_the_reference(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    ours, expected = (make_rope_case(heads, head_dim, 8, 11, dtype, DEVICE) for _ in range(2))
    kernels.rope_and_store(*ours.arguments())
    reference.rope_and_store(*expected.arguments())
    torch.testing.assert_close(ours.outputs(), expected.outputs(), atol=atol, rtol=rtol)
