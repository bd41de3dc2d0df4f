"""Prompt log probabilities and first tokens under a grammar, from the prefill engine.

The harness compares all that is told with the reference and demands that scores come in order, before first tokens.
"""

from typing import Any

import pytest

from common.sampling import GrammarKind, GrammarSpec, SamplingParams
from prefill_svc.request import Cancel
from tests.factories.engines import LETTERS, compile_regex
from tests.prefill_svc.harness import PrefillHarness
from tests.prefill_svc.test_prefill_engine import request


def scored(number: int = 1, length: int = 10, num_top: int = 2, **fields: Any) -> Any:
    params = SamplingParams(temperature=0.0, prompt_logprobs=num_top)
    return request(number, length, prompt_ids=tuple(i % 24 for i in range(length)), params=params, **fields)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("first_choices", [(), (0,), (0, 2)])
def test_every_prompt_token_but_the_first_is_scored(length: int, first_choices: tuple[int, ...]) -> None:
    harness = PrefillHarness(budget=4)
    told = harness.run(scored(length=length, first_choices=first_choices))
    harness.finish()
    assert len(told.scores) == length - 1


def test_scores_come_chunk_by_chunk() -> None:
    harness = PrefillHarness(budget=4)
    told = harness.run(scored(length=10))
    counts = []
    while harness.step():
        counts.append(len(told.scores))
    assert counts == [4, 8, 9]
    harness.finish()


def test_a_warm_cache_is_not_read_and_stays_sound() -> None:
    harness = PrefillHarness()
    for number, params in enumerate([SamplingParams(), SamplingParams(prompt_logprobs=1), SamplingParams()], 1):
        told = harness.run(request(number, 17, params=params))
        harness.finish()
        assert told.ended is not None
        assert told.ended.cached_tokens == (16 if number == 3 else 0), f"run {number}"


def test_a_prompt_part_of_which_the_peer_holds_is_scored_whole() -> None:
    harness = PrefillHarness(budget=4)
    told = harness.run(scored(length=17, first_token=8))
    harness.finish()
    assert len(told.scores) == 16
    assert told.ended is not None and told.ended.messages == 9


def test_strangers_in_the_batch_change_nothing() -> None:
    harness = PrefillHarness(budget=9)
    told = [harness.run(scored(n, 3 + n, num_top=n) if n % 2 else request(n, 6 + n)) for n in range(1, 6)]
    harness.finish()
    assert [len(one.scores) for one in told] == [3, 0, 5, 0, 7]


def test_long_ones_leave_in_bounded_parts() -> None:
    harness = PrefillHarness(num_blocks=400, budget=1500)
    told = harness.run(scored(length=1300, num_top=0))
    harness.finish()
    sizes = [len(output.entries) for batch in harness.batches for output in batch if hasattr(output, "entries")]
    assert sizes == [512, 512, 275] and len(told.scores) == 1299


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancel_among_them_ends_everything(steps: int) -> None:
    harness = PrefillHarness(budget=4)
    told = harness.run(scored(length=10))
    for _ in range(steps):
        harness.step()
    told.cancelled = True
    harness.engine.handle(Cancel("d", 1))
    harness.finish()
    assert len(told.scores) == 4 * steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_first_tokens_are_the_grammars(temperature: float) -> None:
    harness = PrefillHarness(budget=6)
    params = SamplingParams(temperature=temperature, seed=3, presence_penalty=1.0)
    told = []
    for number, regex in enumerate(["[stuv]a*", "b", None, "[c-e]+"], 1):
        grammar = None if regex is None else compile_regex(regex)
        told.append(harness.run(request(number, 7, params=params, first_choices=(0, 1, 5), grammar=grammar)))
    harness.finish()
    for one, letters in zip(told, ["stuv", "b", LETTERS, "cde"], strict=True):
        assert one.first is not None and [choice for choice, _ in one.first] == [0, 1, 5]
        assert all(LETTERS[token.token_id] in letters for _, token in one.first)


def test_a_grammar_that_was_not_compiled_is_refused() -> None:
    harness = PrefillHarness()
    told = harness.run(request(params=SamplingParams(grammar=GrammarSpec(GrammarKind.EBNF, 'root ::= "a"'))))
    assert told.ended is not None and told.ended.outcome == "rejected" and told.ended.message.startswith("grammar: ")
