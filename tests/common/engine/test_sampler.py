"""What a request's parameters do to its tokens, seen through the sampler's front door."""

import math
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from common.engine.sampler import Sampler, SampleRow
from common.engine.sampler.adjust import adjusted
from common.sampling import Candidate, SampledToken, SamplingParams

VOCAB = 12
EOS = 11


def row(params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = (), choice: int = 0) -> SampleRow:
    return SampleRow(params, choice, len(output), prompt, output)


def greedy(**kwargs: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **kwargs)  # type: ignore[arg-type]


def logits_of(*values: float) -> Tensor:
    """One row that starts with `values`; the rest is far below."""
    return torch.tensor([[*values, *[-50.0] * (VOCAB - len(values))]])


def choose(logits: Tensor, *rows: SampleRow) -> list[int]:
    return [token.token_id for token in Sampler(logits.shape[1], [logits.shape[1] - 1]).sample(logits, rows)]


def adjusted_row(logits: Tensor, one: SampleRow) -> list[float]:
    values: list[float] = adjusted(logits, [one], [EOS])[0].tolist()
    return values


def test_greedy_takes_the_best_token_and_the_lowest_id_on_ties() -> None:
    assert choose(logits_of(1.0, 3.0, 2.0), row(greedy())) == [1]
    assert choose(logits_of(1.0, 3.0, 3.0, 3.0), row(greedy())) == [1]
    assert choose(torch.zeros(1, VOCAB), row(greedy())) == [0]


def test_no_rows_no_tokens() -> None:
    assert Sampler(VOCAB, [EOS]).sample(torch.zeros(0, VOCAB), []) == []


def test_tokens_come_without_log_probabilities_unless_asked_for() -> None:
    assert Sampler(VOCAB, [EOS]).sample(logits_of(1.0), [row(greedy())]) == [SampledToken(0, None)]


def test_logit_bias_can_promote_and_ban() -> None:
    assert choose(logits_of(1.0, 3.0, 2.0), row(greedy(logit_bias={0: 100.0}))) == [0]
    assert choose(logits_of(1.0, 3.0, 2.0), row(greedy(logit_bias={1: -100.0}))) == [2]
    assert choose(logits_of(1.0, 3.0, 2.0), row(SamplingParams(logit_bias={1: -100.0, 0: -100.0}))) == [2]


def test_end_and_stop_tokens_are_masked_until_min_tokens_are_out() -> None:
    logits = logits_of(1.0, 2.0, 3.0)
    logits[0, EOS] = 4.0
    params = greedy(min_tokens=2, stop_token_ids=(2,))
    assert choose(logits, row(params)) == [1]
    assert choose(logits, row(params, output=[5])) == [1]
    assert choose(logits, row(params, output=[5, 5])) == [EOS]


def test_an_ignored_end_token_ends_nothing_and_is_not_masked() -> None:
    logits = logits_of(1.0, 2.0, 3.0)
    logits[0, EOS] = 4.0
    assert choose(logits, row(greedy(min_tokens=2, ignore_eos=True))) == [EOS]
    assert choose(logits, row(greedy(min_tokens=2, ignore_eos=True, stop_token_ids=(EOS,)))) == [2]


def test_a_bias_does_not_lift_the_min_tokens_mask() -> None:
    logits = logits_of(1.0, 2.0)
    assert choose(logits, row(greedy(min_tokens=1, logit_bias={EOS: 100.0}))) == [1]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output_once() -> None:
    logits = logits_of(4.0, -4.0, 4.0, 4.0)
    values = adjusted_row(logits, row(SamplingParams(repetition_penalty=2.0), prompt=[0, 0, 1], output=[2, 2]))
    assert values[:4] == [2.0, -8.0, 2.0, 4.0]


def test_frequency_penalty_counts_and_presence_penalty_does_not_and_neither_sees_the_prompt() -> None:
    logits = logits_of(4.0, 4.0, 4.0, 4.0)
    prompt, output = [3, 3], [1, 2, 2, 2]
    frequency = adjusted_row(logits, row(SamplingParams(frequency_penalty=0.5), prompt, output))
    assert frequency[:4] == [4.0, 3.5, 2.5, 4.0]
    presence = adjusted_row(logits, row(SamplingParams(presence_penalty=0.5), prompt, output))
    assert presence[:4] == [4.0, 3.5, 3.5, 4.0]


def test_bias_comes_before_repetition_penalty_and_that_before_the_others() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    values = adjusted_row(logits_of(0.0, 4.0), row(params, prompt=[1], output=[1, 1]))
    assert values[1] == (4.0 + 2.0) / 2.0 - 2 * 0.25 - 0.5


def test_negative_penalties_reward() -> None:
    values = adjusted_row(logits_of(1.0), row(SamplingParams(presence_penalty=-1.5), output=[0]))
    assert values[0] == 2.5


def test_repetition_penalty_agrees_with_transformers() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 500, generator=generator) * 4
    prompt = torch.randint(500, (60,), generator=generator).tolist()
    output = torch.randint(500, (30,), generator=generator).tolist()
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), logits)
    ours = adjusted(logits, [row(SamplingParams(repetition_penalty=1.3), prompt, output)], [])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("make", [list, tuple, np.array, lambda ids: array("I", ids), lambda ids: array("q", ids)])
def test_tokens_so_far_may_be_any_sequence(make) -> None:  # type: ignore[no-untyped-def]
    logits = logits_of(4.0, 3.9, 3.0)
    params = greedy(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)
    assert choose(logits, row(params, make([0]), make([1, 1]))) == [0]


def test_the_raw_logits_are_left_alone() -> None:
    logits = logits_of(4.0, 3.0)
    before = logits.clone()
    everything = SamplingParams(
        top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0,
        logit_bias={0: -9.0}, min_tokens=9, logprobs=2,
    )  # fmt: skip
    choose(logits, row(everything, [0], [1]))
    assert torch.equal(logits, before)


def test_log_probabilities_are_those_of_the_raw_logits_best_first() -> None:
    logits = logits_of(1.0, 3.0, 2.0)
    params = greedy(logprobs=3, logit_bias={0: 100.0}, repetition_penalty=5.0)
    [token] = Sampler(VOCAB, [EOS]).sample(logits, [row(params, [1], [2])])
    raw = torch.log_softmax(logits, -1)[0].tolist()
    assert token.logprobs is not None
    assert token.logprobs.chosen == Candidate(0, raw[0])
    assert token.logprobs.top == (Candidate(1, raw[1]), Candidate(2, raw[2]), Candidate(0, raw[0]))


def test_log_probabilities_of_no_others_and_of_more_than_there_are() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    none, everyone = Sampler(VOCAB, [EOS]).sample(logits, [row(greedy(logprobs=0)), row(greedy(logprobs=50))])
    assert none.logprobs is not None
    assert none.logprobs.top == ()
    assert everyone.logprobs is not None
    assert sorted(c.token_id for c in everyone.logprobs.top) == list(range(VOCAB))
    assert math.isclose(sum(math.exp(c.logprob) for c in everyone.logprobs.top), 1.0, rel_tol=1e-5)


def test_ties_among_the_best_are_listed_by_id() -> None:
    logits = logits_of(1.0, 2.0, 2.0, 2.0, 2.0)
    [token] = Sampler(VOCAB, [EOS]).sample(logits, [row(greedy(logprobs=3))])
    assert token.logprobs is not None
    assert [c.token_id for c in token.logprobs.top] == [1, 2, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [greedy(), SamplingParams()])
def test_broken_logits_are_an_assertion_that_names_the_row(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 5] = bad
    with pytest.raises(AssertionError, match=r"rows \[1\] of 3"):
        choose(logits, *[row(params)] * 3)


def test_masking_every_token_is_an_assertion() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    with pytest.raises(AssertionError, match="adjusted"):
        choose(torch.zeros(1, VOCAB), row(params))


@pytest.mark.parametrize("params", [SamplingParams(logit_bias={VOCAB: 1.0}), SamplingParams(logit_bias={-1: 1.0})])
def test_a_bias_outside_the_vocabulary_is_an_assertion(params: SamplingParams) -> None:
    with pytest.raises(AssertionError, match=f"vocabulary of {VOCAB}"):
        choose(torch.zeros(1, VOCAB), row(params))


def test_wrong_shapes_and_types_are_assertions() -> None:
    with pytest.raises(AssertionError, match="2 rows"):
        choose(torch.zeros(1, VOCAB), row(greedy()), row(greedy()))
    with pytest.raises(AssertionError, match="bfloat16"):
        choose(torch.zeros(1, VOCAB, dtype=torch.bfloat16), row(greedy()))
    with pytest.raises(AssertionError, match="index 1"):
        SampleRow(greedy(), 0, 1, [], [])


def test_a_view_of_padded_logits_is_fine() -> None:
    padded = torch.randn(3, VOCAB + 4, generator=torch.Generator().manual_seed(1))
    view = padded[:, :VOCAB]
    rows = [
        row(greedy()),
        row(SamplingParams(top_k=3, seed=1)),
        row(SamplingParams(top_p=0.5, repetition_penalty=1.2, seed=2), [1], [2]),
    ]
    assert choose(view, *rows) == choose(view.contiguous(), *rows)
