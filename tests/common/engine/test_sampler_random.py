"""Randomness: the right generator, the right distribution, and nothing but the row itself decides."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from common.engine.sampler import Sampler, SampleRow
from common.engine.sampler.draw import filtered_probabilities, inverse_cdf
from common.engine.sampler.randomness import philox4x32, uniforms
from common.sampling import SamplingParams

#: Upper 1e-5 points of chi-square, by degrees of freedom; the seeds are fixed, so a pass stays a pass.
CHI_SQUARE_LIMIT = {7: 36.5, 9: 40.5, 99: 169.0}


def words(*values: int) -> tuple[NDArray[np.uint64], ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    result = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in result) == expected


def test_numbers_never_change_between_versions() -> None:
    # A fail-over between two builds must draw alike: changing these constants breaks running requests.
    numbers = uniforms([0, 1, 2**64 - 1, 7], [0, 0, 3, 2**32 - 1], [0, 0, 5, 2**40])
    assert numbers.tolist() == [0.3990464708489646, 0.8902591729757107, 0.8759138578884008, 0.935578976024458]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_numbers_lie_inside_the_open_interval(seed: int, choice: int, index: int) -> None:
    [number] = uniforms([seed], [choice], [index])
    assert 0.0 < number < 1.0


def chi_square(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("varied", ["seeds", "choices", "output_indices"])
def test_numbers_are_uniform_along_each_part_of_the_key(varied: str) -> None:
    arguments = {"seeds": [11], "choices": [2], "output_indices": [3]}
    size = 20_000
    arguments = {name: value * size for name, value in arguments.items()} | {varied: list(range(size))}
    numbers = uniforms(**arguments)
    counts = np.bincount((numbers * 10).astype(int), minlength=10)
    assert chi_square(counts, np.full(10, 0.1)) < CHI_SQUARE_LIMIT[9]
    # Neighbours in the stream are independent: all pairs of deciles are equally common.
    pairs = (numbers[:-1] * 10).astype(int) * 10 + (numbers[1:] * 10).astype(int)
    assert chi_square(np.bincount(pairs, minlength=100), np.full(100, 0.01)) < CHI_SQUARE_LIMIT[99]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(temperature=1.5, top_k=8, top_p=0.999)]
)
def test_tokens_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, 1.0, -0.5, 1.5, 0.7]])
    size = 20_000
    rows = [SampleRow(replace(params, seed=seed), 0, 0, [], []) for seed in range(size)]
    tokens = [token.token_id for token in Sampler(8, []).sample(logits.expand(size, 8).contiguous(), rows)]
    probs = filtered_probabilities(logits, [params])[0]
    assert chi_square(np.bincount(tokens, minlength=8), (probs / probs.sum()).numpy()) < CHI_SQUARE_LIMIT[7]


def test_the_draw_is_the_inverse_cdf_in_token_id_order() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    for seed in range(200):
        [number] = uniforms([seed], [0], [0])
        [token] = Sampler(4, []).sample(logits, [SampleRow(SamplingParams(seed=seed), 0, 0, [], [])])
        assert token.token_id == int(np.searchsorted([0.1, 0.3, 0.6, 1.0], number, side="right"))


def test_the_inverse_cdf_at_its_edges() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 4, dtype=torch.float64) * 3.0
    numbers = torch.tensor([2.0**-53, 0.5 - 2.0**-53, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(probs, numbers) == [1, 1, 3, 3]


def test_removed_tokens_are_never_drawn() -> None:
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(5))
    logits[:, ::2] = -torch.inf
    rows = [SampleRow(SamplingParams(seed=seed, top_p=0.8), 0, 0, [], []) for seed in range(400)]
    tokens = torch.tensor([token.token_id for token in Sampler(50, []).sample(logits, rows)])
    survived = filtered_probabilities(logits, [row.params for row in rows]).gather(1, tokens[:, None])
    assert bool((survived > 0).all())


def test_seed_choice_and_index_each_change_the_token() -> None:
    logits = torch.zeros(1, 1 << 20)
    sampler = Sampler(1 << 20, [])

    def token(seed: int, choice: int, index: int) -> int:
        row = SampleRow(SamplingParams(seed=seed), choice, index, [], [0] * index)
        return sampler.sample(logits, [row])[0].token_id

    assert token(1, 2, 3) == token(1, 2, 3)
    assert len({token(1, 2, 3), token(2, 2, 3), token(1, 3, 3), token(1, 2, 4)}) == 4


params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 64]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (3, 4)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    logit_bias=st.sampled_from([{}, {5: 4.0, 6: -100.0}]),
)


@st.composite
def sample_rows(draw: st.DrawFn) -> SampleRow:
    tokens = st.lists(st.integers(0, 99), max_size=6)
    output = draw(tokens)
    return SampleRow(draw(params_of_any_kind), draw(st.integers(0, 9)), len(output), draw(tokens), output)


@given(st.lists(sample_rows(), min_size=1, max_size=8), st.integers(0, 1000))
@settings(max_examples=60)
def test_a_row_gets_the_same_token_alone_and_in_any_company(rows: list[SampleRow], seed: int) -> None:
    logits = torch.randn(len(rows), 100, generator=torch.Generator().manual_seed(seed)) * 3
    sampler = Sampler(100, [0])
    together = sampler.sample(logits, rows)
    assert together == [sampler.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together[::-1] == sampler.sample(logits.flip(0), rows[::-1])


@pytest.fixture
def restore_threads():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("vocab_size", [49_152, 50_257])
def test_a_real_vocabulary_gives_equal_bits_alone_in_a_batch_and_with_other_threads(vocab_size: int) -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=50),
        SamplingParams(min_p=0.02),
        SamplingParams(temperature=1.3, top_k=200, top_p=0.95, min_p=0.001),
    ]
    params = [kinds[i % len(kinds)] for i in range(11)]
    logits = torch.randn(11, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    torch.set_num_threads(1)
    alone = [filtered_probabilities(logits[i : i + 1], [param]) for i, param in enumerate(params)]
    cdfs = [probs.cumsum(-1) for probs in alone]
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        together = filtered_probabilities(logits, params)
        assert_rows_equal(together, alone)
        assert_rows_equal(together.cumsum(-1), cdfs)
        assert_rows_equal(together[2:3].cumsum(-1), cdfs[2:3])


def assert_rows_equal(together: Tensor, alone: list[Tensor]) -> None:
    for i, row in enumerate(alone):
        assert torch.equal(together[i : i + 1], row), f"row {i} differs in the last bits"
