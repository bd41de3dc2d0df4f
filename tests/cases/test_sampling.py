"""SA: what is drawn depends on the request alone, and every number that comes back is one."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cases.case_data import Case, Json, post
from tests.cases.replies import Reply
from tests.cases.streams import strangers
from tests.cases.system import MONOLITH, System, assert_finite, gateway_beside
from tests.cases.vocabulary import word_biases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PARIS = " Paris"
#: The end token.
END = "2"
DRAWN = {"prompt": "The capital of France is", "temperature": 0.9, "max_tokens": 24, "ignore_eos": True}


def draw(system: System, seed: int | None, gateway: str = "gateway") -> str:
    return system.send(
        post("/v1/completions", {**DRAWN, **({} if seed is None else {"seed": seed})}), gateway=gateway
    ).text


@pytest.mark.parametrize("others", [1, 3, 15])
def test_sa_01_seed_counts_in_any_company(system: System, others: int) -> None:
    alone = draw(system, 42)
    endless = {
        "prompt": "Once upon a time",
        "temperature": 1,
        "max_tokens": system.context - 16,
        "ignore_eos": True,
        "stream": True,
    }
    with strangers(system, [post("/v1/completions", endless)] * others), ThreadPoolExecutor(2) as pool:
        assert draw(system, 42) == alone
        assert list(pool.map(lambda _: draw(system, 42), range(2))) == [alone] * 2
        assert draw(system, 43) != alone


def test_sa_01_without_a_seed_each_answer_is_another(system: System) -> None:
    assert draw(system, None) != draw(system, None)
    # Seeds are drawn by gateways: a new one does not begin where the last one did.
    answers = []
    for _ in range(2):
        with gateway_beside(system, "drawing"):
            answers.append([draw(system, None, gateway="drawing") for _ in range(2)])
    assert answers[0] != answers[1]


def test_sa_02_extreme_settings(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["SA-02"])
    greedy = system.complete("The capital of France is", max_tokens=8).text
    same_as_greedy = (
        "{'temperature': 1, 'top_k': 1, 'echo': True}",
        "{'temperature': 0.0001}",
        "{'temperature': 1e-30}",
        # Documented: 0 means greedy.
        "{'temperature': 1, 'top_p': 0}",
        "{'temperature': 1, 'top_p': 1e-09}",
    )
    for name, reply in replies.items():
        # Strictly parsed by `json`.
        assert reply.status == 200 and reply.json["choices"], reply
        given = [entry for entry in reply.logprobs if entry[1] is not None]
        assert_finite(value for _, value, _, _ in given)
        assert_finite(value for _, _, top, _ in given for value in top.values())
        if name in same_as_greedy:
            assert reply.text.removeprefix("The capital of France is") == greedy, name
    replies.assert_all_judged()
    # 0 and -1 are off: as if nothing had been said.
    drawn = [system.send(post("/v1/completions", {**DRAWN, "seed": 5, **off})).text for off in OFF]
    assert len(set(drawn)) == 1


OFF: list[Json] = [{}, {"top_k": 0}, {"top_k": -1}]


# --- penalties ----------------------------------------------------------------------------------------

#: For the twenty of the case: prompts with repetitions, which penalties could see.
OTHER_PROMPTS = [
    "one two three one two three one two",
    "A B A B A B A",
    "The cat sat on the mat. The cat sat on the",
    "yes yes yes yes no no no no yes yes yes yes no",
    "1, 2, 3, 1, 2, 3, 1, 2,",
    "red blue red blue red",
    "London London London",
    "la la la la la la",
    "If it rains, it rains. If it snows, it",
    "x y z x y z x y",
]
PENALTIES = ("{}", "{'presence_penalty': 2.0, 'frequency_penalty': 2.0}", "{'repetition_penalty': 10.0}")


@pytest.mark.parametrize("gateway", ["gateway", MONOLITH])
def test_sa_03_penalties_know_prompt_from_output(system: System, cases: Mapping[str, Case], gateway: str) -> None:
    """That a token of the prompt is avoided needs a model that would repeat it: see `test_real_model.py`."""
    variants = cases["SA-03"].variants
    # Twice each: what was computed for the first time is found in the cache the second time.
    salted = [v.changed(cache_salt=gateway) for v in variants.values()]
    runs = [system.send_all(salted, gateway=gateway) for _ in range(2)]
    cold, warm = (dict(zip(variants, run, strict=True)) for run in runs)
    for replies in (cold, warm):
        plain, output_only, _ = (replies[name].text for name in PENALTIES)
        assert plain == output_only
        few, many = (replies[f"frequency_penalty {penalty}"].text.count(PARIS) for penalty in ("2.0", "0"))
        assert few < many
    for prompt in OTHER_PROMPTS:
        plain, output_only, _ = one_token(system, cases, prompt, gateway)
        assert plain == output_only, prompt


def test_sa_03_the_same_on_one_worker_and_on_two(system: System, cases: Mapping[str, Case]) -> None:
    for prompt in OTHER_PROMPTS:
        assert one_token(system, cases, prompt, "gateway") == one_token(system, cases, prompt, MONOLITH)
    variants = list(cases["SA-03"].variants.values())
    apart, whole = (system.send_all(variants, gateway=gateway) for gateway in ("gateway", MONOLITH))
    assert [reply.texts for reply in apart] == [reply.texts for reply in whole]
    for reply in apart:
        system.assert_twin_agrees(reply)


def one_token(system: System, cases: Mapping[str, Case], prompt: str, gateway: str) -> list[str]:
    """What comes behind `prompt` without and with penalties."""
    variants = [cases["SA-03"].variants[name].changed(prompt=prompt, cache_salt=gateway) for name in PENALTIES]
    return [reply.text for reply in system.send_all(variants, gateway=gateway)]


# --- ends ---------------------------------------------------------------------------------------------


def test_sa_04_where_an_answer_may_end(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["SA-04"])
    ignoring = replies["ignore_eos"]
    assert (ignoring.usage["completion_tokens"], ignoring.finish_reason) == (200, "length")
    assert "<|im_end|>" not in ignoring.text
    # Documented: ten tokens that are no end, then the end token, which counts.
    forced = replies["min_tokens 10, end token forced"]
    assert (forced.usage["completion_tokens"], forced.finish_reason) == (11, "stop")
    stopped = replies["min_tokens with stop"]
    assert stopped.usage["completion_tokens"] > 10
    assert replies["min > max"].status == 400
    assert replies["min > max"].error["param"] == "min_tokens"
    for reply in replies.values():
        system.assert_twin_agrees(reply)
    replies.assert_all_judged()
    # Whatever the model would say: an end at each step is none.
    only_ends = system.send(ignoring.variant.changed(logit_bias={END: 100}))
    assert (only_ends.usage["completion_tokens"], only_ends.finish_reason) == (200, "length")
    assert "<|im_end|>" not in only_ends.text


#: Texts that a draft of repeated tokens would guess right, and one that it would not.
GUESSABLE = ["one two three one two three one two", "A B A B A B A", "The capital of France is"]


@pytest.mark.parametrize("prompt", GUESSABLE)
def test_sa_05_no_token_too_many(system: System, tiny_model: Path, prompt: str) -> None:
    """There is no speculation; what holds for a drafted answer holds without drafts."""
    words = word_biases(tiny_model)

    def scored(max_tokens: int, *, gateway: str = "gateway", **fields: object) -> Reply:
        return system.complete(prompt, max_tokens=max_tokens, logprobs=2, logit_bias=words, gateway=gateway, **fields)

    whole = scored(32)
    for max_tokens in (1, 2, 3, 5):
        part = scored(max_tokens)
        assert part.usage["completion_tokens"] == len(part.logprobs) == max_tokens
        assert whole.text.startswith(part.text)
    stop = whole.text[6:10]
    stopped = scored(32, stop=[stop])
    assert stopped.text == whole.text.partition(stop)[0]
    assert stopped.usage["completion_tokens"] == len(stopped.logprobs)
    monolithic = scored(32, gateway=MONOLITH)
    assert (monolithic.text, monolithic.usage["completion_tokens"]) == (whole.text, whole.usage["completion_tokens"])
