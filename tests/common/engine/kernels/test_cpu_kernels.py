"""The native CPU kernels against the reference, and the bits that must not depend on the batch."""

import pytest
import torch
from torch import Tensor

from common.engine.batch import SequenceChunk, build_batch
from common.engine.kernels.cpu.kernels import CpuKernels
from common.engine.kernels.reference import ReferenceKernels
from tests.common.engine.kernels.cases import (
    HEADS,
    SHAPES,
    AttentionCase,
    make_attention_case,
    make_rope_case,
    mixed_lengths,
)

reference = ReferenceKernels()
pytestmark = pytest.mark.usefixtures("two_threads")

#: [out, in]: SmolLM2's own, and sizes that fill neither panels nor blocks of the depth.
WEIGHT_SHAPES = ((960, 576), (576, 1536), (1, 1), (33, 7), (47, 385), (250, 768))
ROW_COUNTS = (1, 2, 3, 5, 7, 12, 13, 16, 31, 64, 96, 97, 200)


def attention(kernels: CpuKernels, case: AttentionCase, chunks: list[SequenceChunk], q: Tensor) -> Tensor:
    batch = build_batch(chunks, case.block_size, q.device)
    return kernels.paged_attention(q, case.k_cache, case.v_cache, batch, case.scale)


@pytest.mark.parametrize("shape", WEIGHT_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_the_reference_for_any_rows(
    cpu_kernels: CpuKernels, shape: tuple[int, int], with_bias: bool
) -> None:
    weight, bias = torch.randn(shape) / shape[1] ** 0.5, torch.randn(shape[0]) if with_bias else None
    linear = cpu_kernels.pack_linear(weight.clone(), bias)
    for rows in ROW_COUNTS:
        x = torch.randn(rows, shape[1])
        torch.testing.assert_close(linear(x), reference.pack_linear(weight, bias)(x), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", WEIGHT_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(
    cpu_kernels: CpuKernels, shape: tuple[int, int], with_bias: bool
) -> None:
    linear = cpu_kernels.pack_linear(torch.randn(shape), torch.randn(shape[0]) if with_bias else None)
    x = torch.randn(201, shape[1])
    whole = linear(x)
    for rows in ROW_COUNTS:
        for start in (0, 1, 201 - rows):
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows])
    torch.set_num_threads(1)
    assert torch.equal(linear(x), whole)


@pytest.mark.parametrize("shape", WEIGHT_SHAPES)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_rows_are_those_of_the_weight(cpu_kernels: CpuKernels, shape: tuple[int, int], kernels: str) -> None:
    weight = torch.randn(shape)
    linear = (cpu_kernels if kernels == "cpu" else reference).pack_linear(weight.clone(), None)
    for indices in (torch.tensor([shape[0] - 1, 0, shape[0] - 1]), torch.arange(shape[0]), torch.empty(0).long()):
        rows = linear.rows(indices)
        assert rows.is_contiguous() and torch.equal(rows, weight[indices])
        rows.zero_()  # the caller's own
    assert torch.equal(linear.rows(torch.arange(shape[0])), weight)


def test_linear_takes_rows_that_are_apart(cpu_kernels: CpuKernels) -> None:
    linear, wide = cpu_kernels.pack_linear(torch.randn(50, 30), None), torch.randn(9, 70)
    assert torch.equal(linear(wide[:, 10:40]), linear(wide[:, 10:40].clone()))
    assert torch.equal(linear(wide.T[10:40].T), linear(wide[:, 10:40].clone()))
    assert linear(torch.empty(0, 30)).shape == (0, 50)


def test_packing_takes_a_slice_or_a_transpose(cpu_kernels: CpuKernels) -> None:
    stored, x = torch.randn(60, 50), torch.randn(4, 30)
    expected = cpu_kernels.pack_linear(stored[:, :30].clone(), None)(x)
    assert torch.equal(cpu_kernels.pack_linear(stored[:, :30], None)(x), expected)
    assert torch.equal(cpu_kernels.pack_linear(stored[:, :30].T.contiguous().T, None)(x), expected)


def test_weights_of_one_arena_do_not_touch(cpu_kernels: CpuKernels) -> None:
    weights = [torch.randn(n, 19) for n in (5, 64, 33, 100)]
    linears = [cpu_kernels.pack_linear(weight.clone(), None) for weight in weights]
    for weight, linear in zip(weights, linears, strict=True):
        torch.testing.assert_close(linear(torch.eye(19)), weight.T)


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [*SHAPES, ((7, 1), 10, 16), ((200, 1), 64, 8)])
def test_attention_equals_the_reference(
    cpu_kernels: CpuKernels, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    lengths = mixed_lengths(block_size)
    case = make_attention_case(heads, head_dim, block_size, lengths[:6] if heads[0] > 100 else lengths)
    arguments = case.k_cache, case.v_cache, case.batch, case.scale
    out = cpu_kernels.paged_attention(case.q, *arguments)
    torch.testing.assert_close(out, reference.paged_attention(case.q, *arguments), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", HEADS)
def test_attention_has_the_same_bits_alone_and_in_a_batch(cpu_kernels: CpuKernels, heads: tuple[int, int]) -> None:
    case = make_attention_case(heads, 64, 16, mixed_lengths(16))
    together = attention(cpu_kernels, case, list(case.chunks), case.q)
    for chunk, rows in zip(case.chunks, case.rows(), strict=True):
        assert torch.equal(attention(cpu_kernels, case, [chunk], case.q[rows]), together[rows])
    # The more threads, the fewer heads are computed together.
    for threads in (1, 3, 24, 100):
        torch.set_num_threads(threads)
        assert torch.equal(attention(cpu_kernels, case, list(case.chunks), case.q), together)


@pytest.mark.parametrize("cut", [1, 31, 32, 128, 200])
def test_attention_has_the_same_bits_however_a_prompt_is_cut(cpu_kernels: CpuKernels, cut: int) -> None:
    case = make_attention_case((9, 3), 64, 16, [(0, 300)])
    table = case.chunks[0].block_table
    pieces = [SequenceChunk([0] * min(cut, 300 - start), start, table, True) for start in range(0, 300, cut)]
    whole = attention(cpu_kernels, case, list(case.chunks), case.q)
    cut_up = [attention(cpu_kernels, case, [piece], case.q[piece.start : piece.end]) for piece in pieces]
    assert torch.equal(torch.cat(cut_up), whole)


def test_attention_has_the_same_bits_for_every_block_size(cpu_kernels: CpuKernels) -> None:
    lengths = mixed_lengths(16)
    case = make_attention_case((9, 3), 64, 16, lengths)
    other = make_attention_case((9, 3), 64, 32, lengths)
    for cache, other_cache in ((case.k_cache, other.k_cache), (case.v_cache, other.v_cache)):
        for chunk, other_chunk in zip(case.chunks, other.chunks, strict=True):
            context = case.context(cache, chunk)
            for i, block in enumerate(other_chunk.block_table):
                piece = context[i * 32 : (i + 1) * 32]
                other_cache[block, : len(piece)] = piece
    assert torch.equal(
        attention(cpu_kernels, case, list(case.chunks), case.q),
        attention(cpu_kernels, other, list(other.chunks), case.q),
    )


def test_attention_over_extreme_scores_stays_finite(cpu_kernels: CpuKernels) -> None:
    case = make_attention_case((4, 2), 32, 16, [(299, 1), (0, 150)])
    case.q.mul_(1e4)
    arguments = case.k_cache, case.v_cache, case.batch, case.scale
    out = cpu_kernels.paged_attention(case.q, *arguments)
    # Scores of 1e4 are themselves known to no better than 1e-3.
    torch.testing.assert_close(out, reference.paged_attention(case.q, *arguments), atol=5e-2, rtol=0.0)


@pytest.mark.parametrize("width", [1, 7, 16, 33, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3, 150])
def test_norms_and_activation_equal_the_reference(cpu_kernels: CpuKernels, width: int, rows: int) -> None:
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    torch.testing.assert_close(cpu_kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(cpu_kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected)
    gate_up = torch.randn(rows, 2 * width) * 20
    torch.testing.assert_close(cpu_kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def test_activation_of_extreme_gates(cpu_kernels: CpuKernels) -> None:
    gates = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30]])
    out = cpu_kernels.silu_and_mul(torch.cat((gates, torch.ones_like(gates)), dim=1))
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 1e30]]))


def test_norm_of_heads_of_a_projection(cpu_kernels: CpuKernels) -> None:
    heads, weight = torch.randn(5, 400)[:, 100:228].unflatten(1, (4, 32)), torch.randn(32)
    torch.testing.assert_close(cpu_kernels.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [10, 64, 80])
@pytest.mark.parametrize("num_tokens", [1, 13, 200])
def test_rope_and_store_equals_the_reference(
    cpu_kernels: CpuKernels, heads: tuple[int, int], head_dim: int, num_tokens: int
) -> None:
    ours, expected = (make_rope_case(heads, head_dim, 8, num_tokens) for _ in range(2))
    cpu_kernels.rope_and_store(*ours.arguments())
    reference.rope_and_store(*expected.arguments())
    torch.testing.assert_close(ours.outputs(), expected.outputs())


def test_other_dtypes_are_refused(cpu_kernels: CpuKernels) -> None:
    with pytest.raises(AssertionError, match="float16"):
        cpu_kernels.pack_linear(torch.randn(3, 3).half(), None)
    with pytest.raises(AssertionError, match="float64"):
        cpu_kernels.pack_linear(torch.randn(3, 3), None)(torch.randn(2, 3).double())


def test_a_wrong_width_is_refused(cpu_kernels: CpuKernels) -> None:
    with pytest.raises(AssertionError, match=r"\(2, 4\)"):
        cpu_kernels.pack_linear(torch.randn(3, 3), None)(torch.randn(2, 4))
