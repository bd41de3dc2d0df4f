"""Scores of many positions: those that the sampler's log probabilities would be, one by one, to the bit."""

import pytest
import torch
from torch import Tensor

from common.engine import scoring
from common.engine.sampler.logprobs import token_logprobs
from common.engine.scoring import PART_SIZE, in_parts, score_tokens
from common.sampling import Candidate, TokenLogprobs


def spread(rows: int, vocab: int, seed: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4.0


def full_of_ties(rows: int, vocab: int, seed: int) -> Tensor:
    """As a model in bfloat16 makes them: few different values, on both sides of zero."""
    return (spread(rows, vocab, seed) / 8.0).to(torch.bfloat16).float().mul(4).round().div(4)


def zeros_of_both_signs(rows: int, vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.where(torch.rand(rows, vocab, generator=generator) < 0.5, 0.0, -0.0)


@pytest.mark.parametrize("make", [spread, full_of_ties, zeros_of_both_signs])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 1000])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 7), (130, 61), (17, 3000)])
def test_they_are_the_samplers(make, num_top: int, rows: int, vocab: int) -> None:  # type: ignore[no-untyped-def]
    logits = make(rows, vocab, rows + num_top)
    targets = [(7 * row) % vocab for row in range(rows)]
    expected = [token_logprobs(row, target, num_top) for row, target in zip(logits, targets, strict=True)]
    assert score_tokens(logits, targets, num_top) == expected


def test_no_row_depends_on_those_ranked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = full_of_ties(50, 40, 0)
    targets = list(range(50 - 10)) + list(range(10))
    whole = score_tokens(logits, targets, 4)
    monkeypatch.setattr(scoring, "_RANKED_ELEMENTS", 120)
    assert score_tokens(logits, targets, 4) == whole
    assert len(whole) == 50


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_model_shows(bad: float) -> None:
    logits = spread(3, 9, 0)
    logits[1, 4] = bad
    with pytest.raises(AssertionError, match="NaN"):
        score_tokens(logits, [0, 1, 2], 2)


@pytest.mark.parametrize("count", [0, 1, PART_SIZE - 1, PART_SIZE, PART_SIZE + 1, 3 * PART_SIZE])
def test_parts_are_bounded_and_whole(count: int) -> None:
    entries = [TokenLogprobs(Candidate(i, -1.0)) for i in range(count)]
    parts = list(in_parts(5, entries))
    assert [entry for _, part in parts for entry in part] == entries
    assert all(0 < len(part) <= PART_SIZE for _, part in parts)
    position = 5
    for first, part in parts:
        assert first == position, f"a part at {first} after {position - 5} entries"
        position += len(part)
