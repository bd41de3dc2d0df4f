"""Grammars on the decode engine: every token of every choice is allowed, wherever the prompt was computed and whatever
happened in between. The harness compares all output with the reference."""

from typing import Any

import pytest

from common.sampling import FinishReason, GrammarKind, GrammarSpec, SampledToken, SamplingParams
from decode_svc.messages import FirstArrived, RejectedOut
from decode_svc.request import ChoicePrefix, Outcome
from tests.decode_svc.harness import DecodeHarness
from tests.decode_svc.requests import P1, P2, prompt, remote_number, request
from tests.factories.engines import EOS, LETTERS, compile_regex

ENDLESS = "([b-f]t?)+"
SHORT = "[a-d]{3}"


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 5, "max_tokens": 14} | fields))


def text(tokens: list[int]) -> str:
    return "".join("" if token == EOS else LETTERS[token] for token in tokens)


def spelled(word: str) -> tuple[int, ...]:
    return tuple(LETTERS.index(letter) for letter in word)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_same_tokens_wherever_the_prompt_is_computed(remote: bool, n: int) -> None:
    grammar = compile_regex(ENDLESS)
    harness = DecodeHarness(peers=[P1.address] if remote else [])
    told = harness.submit(request(n=n, params=params(ignore_eos=True), grammar=grammar, prefill_targets=(P1,)))
    harness.finish()
    assert bool(harness.remotes) == remote
    if remote:
        assert remote_number(harness, 0).run.compiled_grammar == grammar.serialized
    for tokens in told.tokens:
        assert set(text(tokens)) <= set("bcdeft")


def test_without_a_grammar_nothing_is_sent_of_one() -> None:
    harness = DecodeHarness(peers=[P1.address])
    harness.submit(request(prefill_targets=(P1,)))
    harness.step()
    assert remote_number(harness, 0).run.compiled_grammar == b""
    harness.finish()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_a_grammar_is_a_stop_even_if_end_tokens_are_ignored(ignore_eos: bool) -> None:
    harness = DecodeHarness()
    told = harness.submit(request(n=2, params=params(ignore_eos=ignore_eos), grammar=compile_regex(SHORT)))
    harness.finish()
    for index in (0, 1):
        assert len(told.tokens[index]) == 4 and told.tokens[index][-1] == EOS
        assert told.reasons[index] is FinishReason.STOP


def test_max_tokens_cut_a_grammar_short() -> None:
    harness = DecodeHarness()
    told = harness.submit(request(params=params(max_tokens=2), grammar=compile_regex(SHORT)))
    harness.finish()
    assert told.reasons == {0: FinishReason.LENGTH} and len(told.tokens[0]) == 2


def test_a_stop_token_that_the_grammar_allows_ends_the_choice() -> None:
    harness = DecodeHarness()
    (stop,) = spelled("t")
    told = harness.submit(request(params=params(stop_token_ids=(stop,)), grammar=compile_regex("[bc]t[bc]{9}")))
    harness.finish()
    assert told.reasons == {0: FinishReason.STOP} and told.tokens[0][-1] == stop and len(told.tokens[0]) == 2


def test_min_tokens_do_not_make_a_complete_output_longer() -> None:
    harness = DecodeHarness()
    told = harness.submit(request(params=params(min_tokens=10), grammar=compile_regex(SHORT)))
    harness.finish()
    assert len(told.tokens[0]) == 4


def test_preempted_choices_keep_their_place() -> None:
    harness = DecodeHarness(num_blocks=12, block_size=4, max_request_tokens=40)
    grammar = compile_regex("([b-f]t?){24,}")
    for i in range(2):
        wanted = params(max_tokens=28, seed=i)
        harness.submit(request(f"r{i}", prompt_ids=prompt(10, seed=i), params=wanted, grammar=grammar))
    harness.finish()
    assert harness.engine.snapshot.preemptions > 0


@pytest.mark.parametrize("known", [0, 1, 5, 13])
def test_a_replay_goes_on_where_its_output_has_led(known: int) -> None:
    wanted, grammar = params(ignore_eos=True, max_tokens=14), compile_regex("([b-f]t?){12,}")
    harness = DecodeHarness(budget=4)
    whole = harness.submit(request("whole", n=2, params=wanted, grammar=grammar))
    harness.finish()
    choices = (ChoicePrefix(tuple(whole.tokens[0][:known])), ChoicePrefix(tuple(whole.tokens[1]), finished=True))
    replay = harness.submit(request("replay", attempt=1, choices=choices, params=wanted, grammar=grammar))
    harness.finish()
    assert replay.tokens == whole.tokens


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (spelled("t"), "does not allow token"),
        ((*spelled("ab"), EOS), "does not allow token 1 as output token 2"),
        (spelled("abca"), "output token 3"),
        ((*spelled("abc"), EOS), "come to the grammar's end"),
        ((*spelled("abc"), EOS, EOS), "output token 4"),
        ((0,), "does not allow token 0"),
    ],
)
def test_output_that_is_not_of_the_grammar_is_refused_in_words(output: tuple[int, ...], words: str) -> None:
    harness = DecodeHarness()
    choices = (ChoicePrefix(), ChoicePrefix(output))
    told = harness.submit(request(choices=choices, params=params(ignore_eos=True), grammar=compile_regex(SHORT)))
    (answer,) = told.answers
    assert isinstance(answer, RejectedOut) and answer.field == "choices" and words in answer.message
    assert harness.submit(request("other")).accepted
    harness.finish()


def test_output_of_a_finished_choice_may_be_anything() -> None:
    """Whatever it was, nothing is drawn after it."""
    harness = DecodeHarness()
    choices = (ChoicePrefix(), ChoicePrefix(spelled("t"), finished=True))
    assert harness.submit(request(choices=choices, params=params(), grammar=compile_regex(SHORT))).accepted
    harness.finish()


def test_a_grammar_that_was_not_compiled_is_refused() -> None:
    harness = DecodeHarness()
    told = harness.submit(request(params=params(grammar=GrammarSpec(GrammarKind.REGEX, SHORT))))
    (answer,) = told.answers
    assert isinstance(answer, RejectedOut) and answer.field == "grammar"


@pytest.mark.parametrize("bad", [*spelled("t"), EOS, 10**6])
@pytest.mark.parametrize("regex", [SHORT, None])
def test_a_first_token_that_cannot_be_fails_the_prefill_worker(bad: int, regex: str | None) -> None:
    if regex is None and bad < 10**6:
        return
    harness = DecodeHarness(peers=[P1.address, P2.address])
    grammar = None if regex is None else compile_regex(regex)
    told = harness.submit(request(n=2, params=params(), grammar=grammar, prefill_targets=(P1, P2)))
    harness.step()
    run = remote_number(harness, 0).run
    good = spelled("a")[0]
    harness.engine.handle(FirstArrived(run.transfer_id, [(0, SampledToken(good)), (1, SampledToken(bad))]))
    assert told.tokens == [[], []], "not even the good one is used"
    assert [cancel.transfer_id for cancel in harness.cancels] == [run.transfer_id]
    harness.finish()
    assert told.outcome() is Outcome.OK
    assert told.finished is not None and told.finished.timings.prefill_retries == 1
