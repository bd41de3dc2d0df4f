"""Temperature, min_p, top_k and top_p: against transformers, against a plain sort, and at their edges."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.engine.sampler import Sampler, SampleRow
from common.engine.sampler.draw import cut_rows, filtered_probabilities
from common.sampling import SamplingParams

GRID = [
    SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    for temperature in (0.3, 1.0, 1.7)
    for min_p in (0.0, 0.02)
    for top_k in (0, 1, 40, 5000)
    for top_p in (0.05, 0.9, 1.0)
]


def random_logits(rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def normalized(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def by_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution of the same filters, in our order, in float64."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    return torch.softmax(warpers(torch.LongTensor([[0]]), logits.double()), -1)


@pytest.mark.parametrize("params", GRID, ids=lambda p: f"t{p.temperature}-m{p.min_p}-k{p.top_k}-p{p.top_p}")
def test_the_distribution_is_that_of_transformers(params: SamplingParams) -> None:
    for seed, scale in enumerate((0.5, 4.0)):
        logits = random_logits(2, 3000, scale, seed)
        ours = normalized(filtered_probabilities(logits, [params] * 2))
        theirs = by_transformers(logits, params)
        assert torch.equal(ours > 0, theirs > 0), f"{(ours > 0).sum(-1)} survive, not {(theirs > 0).sum(-1)}"
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-14)


filters = st.builds(
    SamplingParams,
    temperature=st.floats(1e-5, 50.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
    top_k=st.integers(0, 25),
    top_p=st.just(1.0) | st.floats(1e-6, 1.0),
)
#: Few distinct values, so that ties are common; some tokens are masked.
coarse_rows = st.lists(st.sampled_from([-math.inf, -3.0, -0.5, 0.0, 0.25, 1.0, 4.0]), min_size=20, max_size=20).filter(
    lambda values: max(values) > -math.inf
)


def by_definition(logits: list[float], params: SamplingParams) -> set[int]:
    """Surviving ids, from the words of the documentation: one order, three heads of it."""
    order = sorted((i for i, v in enumerate(logits) if v > -math.inf), key=lambda i: (-logits[i], i))
    best = logits[order[0]]
    weight = {i: math.exp((logits[i] - best) / params.temperature) for i in order}
    head = [i for i in order if weight[i] >= params.min_p]
    head = head[: params.top_k or None]
    total = sum(weight[i] for i in head)
    kept: list[int] = []
    mass = 0.0
    for i in head:
        if kept and params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weight[i]
    return {i for i in kept if weight[i] > 0.0}


def off_boundary(logits: list[float], params: SamplingParams) -> bool:
    """Whether rounding cannot decide: no threshold is hit to the last bits."""
    order = sorted((v for v in logits if v > -math.inf), reverse=True)
    weights = [math.exp((v - order[0]) / params.temperature) for v in order]
    if any(math.isclose(w, params.min_p, rel_tol=1e-9) for w in weights) or any(0 < w < 1e-290 for w in weights):
        return False
    kept = [w for w in weights if w >= params.min_p][: params.top_k or None]
    sums = np.cumsum(kept) / sum(kept)
    return not any(math.isclose(s, params.top_p, rel_tol=1e-9) for s in sums)


@given(coarse_rows, filters)
@settings(max_examples=150)
def test_survivors_are_those_of_the_definition_ties_included(values: list[float], params: SamplingParams) -> None:
    if off_boundary(values, params):
        probs = filtered_probabilities(torch.tensor([values]), [params])
        assert set(torch.nonzero(probs[0])[:, 0].tolist()) == by_definition(values, params)


@given(st.lists(st.tuples(coarse_rows, filters), min_size=1, max_size=5))
@settings(max_examples=60)
def test_sorting_whole_rows_gives_the_same_as_row_by_row(rows: list[tuple[list[float], SamplingParams]]) -> None:
    rows = [(values, params) for values, params in rows if off_boundary(values, params)]
    if rows:
        logits = torch.tensor([values for values, _ in rows])
        params = [param for _, param in rows]
        only_min_p = filtered_probabilities(logits, [replace(p, top_k=0, top_p=1.0) for p in params])
        assert torch.equal(cut_rows(logits, only_min_p, params), filtered_probabilities(logits, params))


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 1000])
def test_sorting_agrees_at_odd_sizes(vocab_size: int) -> None:
    logits = random_logits(len(GRID), vocab_size)
    only_min_p = filtered_probabilities(logits, [replace(p, top_k=0, top_p=1.0) for p in GRID])
    assert torch.equal(cut_rows(logits, only_min_p, GRID), filtered_probabilities(logits, GRID))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=2.0, top_k=1, top_p=0.1, min_p=0.9),
    ],
)
def test_parameters_that_leave_one_token_agree_with_greedy(params: SamplingParams) -> None:
    logits = random_logits(50, 500)
    logits[:, 7] = -math.inf
    sampler = Sampler(500, [])
    rows = [SampleRow(replace(params, seed=seed), 0, 0, [], []) for seed in range(50)]
    tokens = [token.token_id for token in sampler.sample(logits, rows)]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(temperature=0)])
def test_ties_for_the_best_go_to_the_lowest_id(params: SamplingParams) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0]] * 20)
    rows = [SampleRow(replace(params, seed=seed), 0, 0, [], []) for seed in range(20)]
    assert {token.token_id for token in Sampler(5, []).sample(logits, rows)} == {1}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e5])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=9, top_p=0.5)])
def test_no_scale_or_temperature_overflows(scale: float, temperature: float, params: SamplingParams) -> None:
    logits = random_logits(4, 100, scale)
    logits[:, 3] = -math.inf
    probs = filtered_probabilities(logits, [replace(params, temperature=temperature)] * 4)
    assert bool(torch.isfinite(probs).all())
    assert bool((probs.sum(-1) > 0.0).all())
    assert bool((probs[:, 3] == 0.0).all())


def test_filters_leave_exactly_what_they_say_among_equals() -> None:
    logits = torch.zeros(4, 64)
    params = [
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.501),
        SamplingParams(min_p=1.0),
    ]
    survivors = filtered_probabilities(logits, params) > 0
    assert survivors.sum(-1).tolist() == [7, 32, 33, 64]
    assert survivors[0, :7].all()
    assert survivors[1, :32].all()
