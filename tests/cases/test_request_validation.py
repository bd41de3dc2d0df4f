"""RV: what is wrong with a request is said in words, before work is done, and harms nobody else."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.pb.tandem.v1 import inference_pb2
from tests.cases.case_data import Case
from tests.cases.replies import REPLACEMENT, Reply
from tests.cases.system import CONTROL, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MIB = 2**20


def assert_refused(system: System, reply: Reply, *fields: str) -> None:
    """400 naming one of `fields`, by both doors."""
    assert reply.status == 400, reply
    assert not reply.is_stream, reply
    param = reply.error["param"] or ""
    assert any(param == field or param.startswith((f"{field}[", f"{field}.")) for field in fields), reply
    system.assert_twin_agrees(reply)


def test_rv_01_errors_have_one_shape(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["RV-01"])
    statuses = {
        "unknown model": 404,
        "malformed JSON": 400,
        "messages missing": 400,
        "messages of the wrong type": 400,
        "temperature of the wrong type": 400,
        "wrong method": 405,
        "unknown path": 404,
    }
    assert {name: reply.status for name, reply in replies.items()} == statuses
    assert all(reply.error for reply in replies.values())
    assert replies["unknown model"].error["code"] == "model_not_found"
    assert "no-such-model" in replies["unknown model"].error["message"]
    assert replies["messages missing"].error["param"] == "messages"
    twins = {name: system.assert_twin_agrees(reply) for name, reply in replies.items()}
    # The others are no messages of the twin's types.
    assert {name for name, twin in twins.items() if twin is not None} == {"unknown model", "messages missing"}
    replies.assert_all_judged()


def test_rv_02_logit_bias_is_of_the_vocabulary(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["RV-02"])
    for name, reply in replies.items():
        if name == "control: last valid id":
            assert reply.status == 200, reply
            system.assert_twin_agrees(reply, same_text=False)
        else:
            assert_refused(system, reply, "logit_bias")
    replies.assert_all_judged()


def test_rv_03_messages_must_say_something(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["RV-03"])
    for reply in replies.values():
        assert_refused(system, reply, "messages")
    replies.assert_all_judged()


def test_rv_04_each_prompt_has_its_choices(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["RV-04"])
    prompts = ["The capital of France is", "one two three"]

    echoed = replies["two prompts x n=2"]
    assert set(echoed.texts) == {0, 1, 2, 3}
    assert len(echoed.json["choices"]) == 4
    for index, text in echoed.texts.items():
        assert text.startswith(prompts[index // 2])
    # None of the choices can have ended early without a reason.
    assert echoed.usage["prompt_tokens"] == 8
    lengths = [4 if reason == "length" else None for reason in echoed.finish_reasons.values()]
    if None not in lengths:
        assert echoed.usage["completion_tokens"] == 16
    assert 4 <= echoed.usage["completion_tokens"] <= 16

    by_ids, by_text = replies["two token arrays"], replies["same as strings"]
    assert by_ids.texts == by_text.texts and set(by_ids.texts) == {0, 1}
    for reply in (by_ids, by_text):
        assert reply.usage["prompt_tokens"] == 8

    streamed = replies["streamed"]
    # Reading them asserts that each choice has exactly one.
    assert set(streamed.finish_reasons) == {0, 1, 2, 3}
    replies.assert_all_judged()


def test_rv_05_no_new_token(system: System, cases: Mapping[str, Case]) -> None:
    case = cases["RV-05"]
    replies = system.run(case)
    assert_scored(replies["echo, 0"])
    for name in ("no echo, 0", "chat, 0", "-1"):
        assert_refused(system, replies[name], "max_tokens")
    replies.assert_all_judged()
    with ThreadPoolExecutor(9) as pool:
        controls = [pool.submit(system.send, CONTROL) for _ in range(4)]
        scored = pool.submit(system.send, case.variants["echo, 0"])
        controls += [pool.submit(system.send, CONTROL) for _ in range(4)]
        assert_scored(scored.result())
        assert {control.result().text for control in controls} == {system.control_text}


def assert_scored(reply: Reply) -> None:
    """Nothing but the prompt, with its log probabilities."""
    assert reply.status == 200, reply
    assert reply.text == "The capital of France is"
    assert reply.usage["completion_tokens"] == 0
    assert reply.finish_reason == "length"
    values = [value for _, value, _, _ in reply.logprobs]
    assert len(values) == 5
    assert values[0] is None and all(value <= 0 for value in values[1:])


def test_rv_06_max_tokens_left_out(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["RV-06"])
    null, omitted = replies["null"], replies["omitted"]
    assert null.text == omitted.text
    for reply in (null, omitted):
        assert reply.finish_reason == "stop" or reply.usage["total_tokens"] == system.context, reply.usage
    # Documented: of both, max_completion_tokens counts.
    for name in ("new field", "both"):
        assert (replies[name].usage["completion_tokens"], replies[name].finish_reason) == (7, "length")
        # The seventh token may be half a character.
        assert null.text.startswith(replies[name].text.rstrip(REPLACEMENT))
    replies.assert_all_judged()


def test_rv_07_numbers_out_of_range(system: System, cases: Mapping[str, Case]) -> None:
    case = cases["RV-07"]
    before = system.resident_bytes()
    replies = system.run(case, at_once=1)
    for name, reply in replies.items():
        # Either of two wrong fields may be named.
        wrong = reply.variant.body.keys() - {"model", "prompt"}
        fields = wrong if wrong == {"max_tokens"} else wrong - {"max_tokens"}
        assert_refused(system, reply, *fields)
        # One second on an idle machine.
        assert reply.seconds < 30, name
    after = system.resident_bytes()
    assert all(after[name] - before[name] < 50 * MIB for name in before), (before, after)
    replies.assert_all_judged()
    # 2**63 is the first number that a signed field cannot hold: no client can even send it.
    with pytest.raises(ValueError, match="out of range"):
        inference_pb2.GenerationOptions(seed=2**63)
