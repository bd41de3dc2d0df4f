"""SO: what must match does match, what cannot be enforced is refused, and no grammar takes the machine."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from tests.cases.case_data import Case, Json, Variant
from tests.cases.replies import Reply
from tests.cases.system import CONTROL, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: The end token.
END = "2"


def schema_of(variant: Variant) -> Json:
    schema: Json = variant.body["response_format"]["json_schema"]["schema"]
    return schema


def assert_fits(reply: Reply) -> None:
    validator = jsonschema.validators.validator_for(schema_of(reply.variant))
    checker = validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(reply.text), schema_of(reply.variant), cls=validator, format_checker=checker)


# --- SO-01: schemas and patterns that are none --------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_so_01_what_is_no_grammar_is_refused(system: System, cases: Mapping[str, Case], stream: bool) -> None:
    variants = {name: variant.changed(stream=stream) for name, variant in cases["SO-01"].variants.items()}
    with ThreadPoolExecutor(8) as pool:
        controls = [pool.submit(system.send, CONTROL) for _ in range(8)]
        replies = [system.send(variant) for variant in variants.values()]
        assert {control.result().text for control in controls} == {system.control_text}
    for name, reply in zip(variants, replies, strict=True):
        if name == "large maximum (valid)":
            assert_in_range(reply)
        else:
            assert reply.status == 400 and not reply.is_stream, reply
            assert reply.error["message"]
        system.assert_twin_agrees(reply, same_text=False)


def assert_in_range(reply: Reply) -> None:
    assert reply.status == 200, reply
    # 32 tokens are enough for it: eleven digits at most, and blanks are bounded.
    if reply.finish_reason == "stop":
        assert_fits(reply)


# --- SO-02: keywords ----------------------------------------------------------------------------------

#: How seeds are drawn: freely, and with a push towards the shortest answer, which ends.
DRAWS = [{"seed": 3}, {"seed": 4}, {"seed": 5, "logit_bias": {END: 8}}, {"seed": 6, "logit_bias": {END: 100}}]


def test_so_02_keywords_are_enforced_or_refused(system: System, cases: Mapping[str, Case]) -> None:
    """Fewer seeds than in the case."""
    enforced = {"minItems/maxItems", "maxLength", "integer bounds", "enum and const"}
    for name, variant in cases["SO-02"].variants.items():
        seeded = [variant.changed(**draw, max_tokens=120) for draw in DRAWS]
        first = system.send(seeded[0])
        if first.status == 400:
            assert name not in enforced, first
            assert first.error["message"] and first.error["param"]
            continue
        for reply in (first, *system.send_all(seeded[1:])):
            assert reply.status == 200, reply
            if reply.finish_reason == "stop":
                assert_fits(reply)
        system.assert_twin_agrees(first)


# --- SO-04: where a match ends ------------------------------------------------------------------------


def test_so_04_the_end_token_ends_what_is_complete(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["SO-04"])
    short = replies["short match"]
    assert short.text in ("yes", "no")
    # A token for each letter at most, and the end.
    assert short.finish_reason == "stop" and short.usage["completion_tokens"] <= len(short.text) + 1
    pushed = replies["end tokens pushed"]
    assert pushed.finish_reason == "stop"
    assert_fits(pushed)
    anything = replies["json_object"]
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.text), dict)
    for reply in replies.values():
        system.assert_twin_agrees(reply)


def test_so_04_a_stop_id_inside_of_json_is_no_silent_end(system: System, cases: Mapping[str, Case]) -> None:
    """Documented: the id ends the choice wherever the grammar allows it; the choice must say so."""
    reply = system.send(cases["SO-04"].variants["stop ids that occur in JSON"])
    assert reply.status == 200, reply
    if (hint := reply.json["choices"][0].get("stop_reason")) is not None:
        assert hint in reply.variant.body["stop_token_ids"]
    else:
        assert_fits(reply)


# --- SO-05: choices -----------------------------------------------------------------------------------

#: Fewer seeds than the case has.
LAST_SEED = 8


def test_so_05_exactly_one_of_the_choices(system: System, cases: Mapping[str, Case]) -> None:
    chosen = [v for v in cases["SO-05"].variants.values() if v.body["seed"] <= LAST_SEED]
    plain = system.send_all(chosen, at_once=8)
    for reply in plain:
        assert reply.status == 200, reply
        assert reply.text in reply.variant.body["guided_choice"]
        assert reply.finish_reason == "stop"
    streamed = system.send_all([variant.changed(stream=True) for variant in chosen], at_once=8)
    assert [reply.text for reply in streamed] == [reply.text for reply in plain]
    for reply in plain[:: LAST_SEED // 2]:
        system.assert_twin_agrees(reply)


@pytest.mark.parametrize(
    "fields",
    [{"structured_outputs": {"choices": ["New"]}}, {"guided_whitespace_pattern": " "}, {"guided_choice": "New"}],
)
def test_so_05_a_field_that_is_not_offered_is_refused(system: System, fields: Json) -> None:
    reply = system.complete("The city is", max_tokens=4, **fields)
    assert reply.status == 400, reply
    assert (reply.error["param"] or "").startswith(next(iter(fields))), reply
