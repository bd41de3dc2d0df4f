"""SO: what must match does match, what cannot be enforced is refused, and no grammar takes the machine."""

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from tests.cases.case_data import Case, Json, Variant, post
from tests.cases.processes import busy_processors, descendants, resident_bytes
from tests.cases.replies import Reply
from tests.cases.streams import RawStream
from tests.cases.system import CONTROL, System
from tests.e2e.cluster import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MIB = 2**20
#: The end token of SmolLM2-Instruct.
END = 2


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

SEEDS = range(3, 7)


def test_so_02_keywords_are_enforced_or_refused(system: System, cases: Mapping[str, Case]) -> None:
    """Fewer seeds than in the case."""
    enforced = {"minItems/maxItems", "maxLength", "integer bounds", "enum and const"}
    for name, variant in cases["SO-02"].variants.items():
        seeded = [variant.changed(seed=seed, max_tokens=120) for seed in SEEDS]
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


# --- SO-03: grammars that take long -------------------------------------------------------------------


def nested(depth: int) -> Json:
    """f(depth) of the case, each level said once."""
    levels: Json = {"f0": {"type": "string"}}
    for level in range(1, depth + 1):
        below = {"$ref": f"#/$defs/f{level - 1}"}
        objects = [
            {"type": "object", "properties": {p: below}, "required": [p], "additionalProperties": False} for p in "abc"
        ]
        levels[f"f{level}"] = {"oneOf": objects}
    return {"$defs": levels, "$ref": f"#/$defs/f{depth}"}


def written_out(depth: int) -> Json:
    """The same with every level inside the one above."""
    if depth == 0:
        return {"type": "string"}
    below = written_out(depth - 1)
    return {
        "oneOf": [
            {"type": "object", "properties": {p: below}, "required": [p], "additionalProperties": False} for p in "abc"
        ]
    }


def with_schema(schema: Json) -> Variant:
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "response_format": format_}
    return post("/v1/chat/completions", body)


def heavy() -> list[Variant]:
    rules = "\n".join(f'rule{n} ::= "{n}" rule{(n + 1) % 5000} | "x{n}"' for n in range(5000))
    plain = {"prompt": "x", "max_tokens": 8}
    return [
        *(with_schema(nested(depth)) for depth in (10, 14)),
        with_schema(written_out(6)),
        post("/v1/completions", {**plain, "guided_regex": "(a?){200}a{200}"}),
        post("/v1/completions", {**plain, "guided_grammar": f"root ::= rule0\n{rules}"}),
    ]


def test_so_03_heavy_grammars_take_nothing_from_others(system: System) -> None:
    memory = memory_of(system)
    endless = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with RawStream(system, post("/v1/completions", endless)) as stream, polled_health(system) as slowest:
        stream.read_events(2)
        for variant in heavy():
            read = stream.received.count(b"data: ")
            assert_answered(system.send(variant))
            stream.read_events(read + 2)
        with ThreadPoolExecutor(8) as pool:
            for reply in pool.map(system.send, (heavy() * 2)[:8]):
                assert_answered(reply)
        stream.read_events(stream.received.count(b"data: ") + 2)
        for variant in heavy():
            leave_soon(system, variant)
    # A second on an idle machine.
    assert max(slowest) < 10
    eventually(lambda: busy_processors(system.pids.values()) < 0.5, seconds=30, what="idle processors")
    assert memory_of(system) < memory + 200 * MIB


def assert_answered(reply: Reply) -> None:
    """Documented: a grammar that takes more than 2 s of compute to compile is refused."""
    assert reply.status in (200, 400), reply
    assert reply.status == 200 or reply.error["message"]
    assert reply.seconds < 60


def leave_soon(system: System, variant: Variant) -> None:
    with RawStream(system, variant.changed(stream=True)):
        pass


@contextmanager
def polled_health(system: System) -> Iterator[list[float]]:
    """Seconds that /health took, one after the other; every answer is 200."""
    seconds, over = [0.0], threading.Event()

    def poll() -> None:
        while not over.wait(0.2):
            answer = httpx.get(f"{system.cluster.url}/health", trust_env=False, timeout=30)
            assert answer.status_code == 200
            seconds.append(answer.elapsed.total_seconds())

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        try:
            yield seconds
        finally:
            over.set()
        polling.result()


def memory_of(system: System) -> int:
    """Of all its processes, those that compile grammars included."""
    return sum(resident_bytes(pid) for pid in descendants(system.pids.values()))


# --- SO-04: where a match ends ------------------------------------------------------------------------


def test_so_04_the_end_token_ends_what_is_complete(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["SO-04"])
    short = replies["short match"]
    assert short.text in ("yes", "no")
    assert short.finish_reason == "stop" and short.usage["completion_tokens"] <= 3
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


def test_so_05_each_choice_can_be_reached(system: System, cases: Mapping[str, Case], demo_model: Path) -> None:
    first = next(iter(cases["SO-05"].variants.values()))
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    (york,), (city,) = (tokenizer.encode(word).ids for word in (" York", " City"))
    forced = {"New": {END: 100}, "New York": {york: 100, END: 60}, "New York City": {york: 100, city: 100, END: 60}}
    for text, bias in forced.items():
        reply = system.send(first.changed(logit_bias={str(id_): value for id_, value in bias.items()}))
        assert (reply.text, reply.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    "fields",
    [{"structured_outputs": {"choices": ["New"]}}, {"guided_whitespace_pattern": " "}, {"guided_choice": "New"}],
)
def test_so_05_a_field_that_is_not_offered_is_refused(system: System, fields: Json) -> None:
    reply = system.complete("The city is", max_tokens=4, **fields)
    assert reply.status == 400, reply
    assert (reply.error["param"] or "").startswith(next(iter(fields))), reply
