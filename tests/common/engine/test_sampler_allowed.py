"""Grammar masks in the sampler: what a mask lacks is never drawn, whatever else is asked for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.engine.sampler import Sampler, SampleRow
from common.engine.sampler.adjust import adjusted
from common.engine.sampler.allowed import allows_other_than, apply_allowed
from common.sampling import GrammarKind, GrammarSpec, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def mask(vocab_size: int, *ids: int, beyond: bool = False) -> NDArray[np.int32]:
    """Bits of `ids`; with `beyond`, all those after the vocabulary too."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    if beyond:
        bits[vocab_size:] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def row(allowed: NDArray[np.int32] | None, params: SamplingParams = GREEDY, output: tuple[int, ...] = ()) -> SampleRow:
    return SampleRow(params, 0, len(output), (), output, allowed)


def choose(logits: torch.Tensor, *rows: SampleRow, ends: tuple[int, ...] = ()) -> list[int]:
    return [token.token_id for token in Sampler(logits.shape[1], ends).sample(logits, rows)]


@st.composite
def masked_batches(draw: st.DrawFn) -> tuple[int, list[set[int] | None], bool, int]:
    vocab_size = draw(st.sampled_from([1, 7, 31, 32, 33, 64, 100, 257]))
    ids = st.sets(st.integers(0, vocab_size - 1), min_size=1)
    return vocab_size, draw(st.lists(st.none() | ids, max_size=5)), draw(st.booleans()), draw(st.integers(0, 99))


@given(case=masked_batches())
def test_it_is_what_a_walk_over_the_vocabulary_gives(case: tuple[int, list[set[int] | None], bool, int]) -> None:
    vocab_size, allowed, beyond, seed = case
    logits = torch.randn(len(allowed), vocab_size, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    for number, ids in enumerate(allowed):
        for token in range(vocab_size):
            if ids is not None and token not in ids:
                expected[number, token] = -torch.inf
    rows = [row(None if ids is None else mask(vocab_size, *ids, beyond=beyond)) for ids in allowed]
    kept = logits.clone()
    assert torch.equal(adjusted(logits, rows, ()), expected)
    assert torch.equal(logits, kept)
    apply_allowed(logits, rows)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("free", [(), (0,), (3, 4), (1, 3, 5, 7), (8,), tuple(range(9))])
def test_batches_larger_than_what_is_worked_on_at_a_time(free: tuple[int, ...]) -> None:
    """A vocabulary so large that there are several slices, with rows of no grammar between them."""
    logits, random = torch.zeros(9, 70_001), np.random.default_rng(0)
    allowed = [random.choice(70_001, 50, replace=False) for _ in range(9)]
    apply_allowed(logits, [row(None if i in free else mask(70_001, *ids)) for i, ids in enumerate(allowed)])
    for number, ids in enumerate(allowed):
        finite = torch.nonzero(torch.isfinite(logits[number]))[:, 0].tolist()
        assert finite == (list(range(70_001)) if number in free else sorted(ids.tolist()))


@given(
    vocab_size=st.sampled_from([5, 32, 33, 71]),
    allowed=st.sets(st.integers(0, 4)),
    ends=st.sets(st.integers(0, 4)),
    beyond=st.booleans(),
)
def test_whether_a_mask_allows_more_than_some_tokens(
    vocab_size: int, allowed: set[int], ends: set[int], beyond: bool
) -> None:
    # The last tokens of the vocabulary too, where words and bytes end.
    shift = vocab_size - 5
    words = mask(vocab_size, *(i + shift for i in allowed), beyond=beyond)
    ids = np.asarray([i + shift for i in sorted(ends)] * 2, dtype=np.int64)
    assert allows_other_than(words, ids, vocab_size) == bool(allowed - ends)


class TestTheGrammarWins:
    def test_over_the_best_logit(self) -> None:
        assert choose(torch.tensor([[9.0, 0.0, 1.0, 2.0]]), row(mask(4, 1, 2))) == [2]

    @pytest.mark.parametrize(
        "params",
        [
            replace(GREEDY, logit_bias={0: 100.0, 1: -100.0}),
            replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.9),
            replace(GREEDY, presence_penalty=-9.0, frequency_penalty=-9.0, repetition_penalty=0.1),
            SamplingParams(temperature=1e-6),
            SamplingParams(temperature=2.0, seed=4, top_k=1),
            SamplingParams(temperature=2.0, seed=4, top_k=3, top_p=0.01),
            SamplingParams(temperature=2.0, seed=4, min_p=1.0),
            SamplingParams(temperature=50.0, seed=4, top_p=0.999),
        ],
        ids=str,
    )
    def test_over_whatever_speaks_for_another_token(self, params: SamplingParams) -> None:
        logits = torch.tensor([[9.0, -20.0, 5.0, 8.0, 7.0]])
        assert choose(logits, row(mask(5, 1), params, output=(1, 1, 1))) == [1]

    @pytest.mark.parametrize("seed", range(20))
    def test_draws_stay_inside(self, seed: int) -> None:
        logits = torch.randn(3, 77, generator=torch.Generator().manual_seed(seed)) * 5
        params = SamplingParams(temperature=3.0, seed=seed)
        first, second, free = choose(logits, row(mask(77, 3, 76), params), row(mask(77, 31, 32), params), row(None))
        assert first in (3, 76) and second in (31, 32) and free == int(logits[2].argmax())

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
        rows = [row(mask(50, *range(i, 50, 3)), SamplingParams(seed=i)) if i % 2 else row(None) for i in range(4)]
        alone = [choose(logits[i : i + 1], rows[i])[0] for i in range(4)]
        assert choose(logits, *rows) == alone

    def test_log_probabilities_stay_the_models_own(self) -> None:
        logits = torch.tensor([[9.0, 0.0, 1.0]])
        [token] = Sampler(3, ()).sample(logits, [row(mask(3, 1), replace(GREEDY, logprobs=3))])
        assert token.token_id == 1 and token.logprobs is not None
        assert [c.token_id for c in token.logprobs.top] == [0, 2, 1]
        assert token.logprobs.chosen.logprob == pytest.approx(torch.log_softmax(logits[0], 0)[1].item())


class TestMinTokens:
    """End and stop tokens are held back, but not where the grammar allows nothing else."""

    HELD_BACK = replace(GREEDY, min_tokens=5, stop_token_ids=(2,))

    def test_the_end_is_held_back_while_the_grammar_allows_more(self) -> None:
        logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
        assert choose(logits, row(mask(4, 1, 2, 3), self.HELD_BACK), ends=(1,)) == [3]

    @pytest.mark.parametrize("allowed", [(1,), (2,), (1, 2)])
    def test_it_is_taken_where_only_ends_are_allowed(self, allowed: tuple[int, ...]) -> None:
        logits = torch.tensor([[9.0, 2.0, 1.0, 9.0]])
        assert choose(logits, row(mask(4, *allowed, beyond=True), self.HELD_BACK), ends=(1,)) == [min(allowed)]

    @pytest.mark.parametrize("allowed", [mask(4, 1, 2, 3), None], ids=["some tokens", "every token"])
    def test_an_ignored_end_is_held_back_too_because_it_ends_the_grammar(
        self, allowed: NDArray[np.int32] | None
    ) -> None:
        params = replace(
            self.HELD_BACK, ignore_eos=True, stop_token_ids=(), grammar=GrammarSpec(GrammarKind.EBNF, "any")
        )
        logits = torch.tensor([[0.0, 9.0, 1.0, 8.0]])
        assert choose(logits, row(allowed, params), ends=(1,)) == [3]
        assert choose(logits, row(allowed, replace(params, grammar=None)), ends=(1,)) == [1]
        assert choose(logits, row(mask(4, 1), params), ends=(1,)) == [1]

    def test_without_a_grammar_nothing_changes(self) -> None:
        logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
        assert choose(logits, row(None, self.HELD_BACK), ends=(1,)) == [3]

    def test_a_stop_token_is_subject_to_the_grammar_like_any_other(self) -> None:
        params = replace(GREEDY, stop_token_ids=(2,))
        assert choose(torch.tensor([[0.0, 1.0, 9.0, 1.0]]), row(mask(4, 0, 1), params)) == [1]


class TestWhatIsNoMask:
    @pytest.mark.parametrize("words", [0, 1, 3])
    def test_of_another_length(self, words: int) -> None:
        with pytest.raises(AssertionError, match="for a vocabulary of 40"):
            choose(torch.zeros(1, 40), row(np.full(words, -1, dtype=np.int32)))

    def test_of_another_type(self) -> None:
        with pytest.raises(AssertionError, match="int64"):
            choose(torch.zeros(1, 40), row(np.full(2, -1, dtype=np.int64)))  # type: ignore[arg-type]

    def test_that_allows_nothing(self) -> None:
        with pytest.raises(AssertionError, match="no finite value"):
            choose(torch.zeros(1, 40), row(mask(40, beyond=True)))
