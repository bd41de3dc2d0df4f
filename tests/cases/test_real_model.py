"""What is judged with SmolLM2-135M-Instruct: where its texts, its template or its large vocabulary are the point.

All of it is in one file, so that its system is started once.
"""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.cases.case_data import Case, Json, Variant, post, token_array
from tests.cases.characters import assert_characters_are_whole
from tests.cases.processes import busy_processors, descendants, resident_bytes
from tests.cases.replies import Reply, logprob_entries
from tests.cases.streams import RawStream
from tests.cases.system import MONOLITH, System
from tests.e2e.cluster import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MIB = 2**20
#: The end token.
END = 2


def test_st_01_with_a_vocabulary_of_many_words(demo_system: System, demo_cases: Mapping[str, Case]) -> None:
    assert_characters_are_whole(demo_system, demo_cases["ST-01"])


# --- CT-01, KV-01, SA-03: with texts that mean something ------------------------------------------------

SYSTEM_TURN = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def test_ct_01_with_its_own_template(demo_system: System, demo_cases: Mapping[str, Case]) -> None:
    variant = demo_cases["CT-01"].variants["'OK!'"]
    user, assistant = (message["content"] for message in variant.body["messages"])
    turns = f"{SYSTEM_TURN}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}"
    reply, by_hand = demo_system.send(variant), demo_system.complete(turns, max_tokens=16)
    assert (reply.text, reply.usage["prompt_tokens"]) == (by_hand.text, by_hand.usage["prompt_tokens"])


def test_kv_01_hits_change_nothing(demo_system: System) -> None:
    """All lengths are tried with a small model."""
    ask = {"prompt": token_array(40, seed=1040), "temperature": 0, "max_tokens": 12, "logprobs": 1}
    # Nobody has this salt: nothing is cached, and nothing is prefilled apart.
    reference = demo_system.send(post("/v1/completions", {**ask, "cache_salt": "reference"}), gateway=MONOLITH)
    cold, warm = (demo_system.send(post("/v1/completions", {**ask, "cache_salt": "kv-01"})) for _ in range(2))
    assert reference.cached_tokens == cold.cached_tokens == 0 < warm.cached_tokens
    for answer in (cold, warm):
        assert answer.text == reference.text
        values, expected = ([value for _, value, _, _ in reply.logprobs] for reply in (answer, reference))
        assert values == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("gateway", ["gateway", MONOLITH])
def test_sa_03_a_token_of_the_prompt_is_avoided(
    demo_system: System, demo_cases: Mapping[str, Case], gateway: str
) -> None:
    """With a prompt that this model repeats: behind the case's own it has had enough of Paris anyway."""
    variants = demo_cases["SA-03"].variants
    repeating = {"prompt": "I like Paris. You like Paris. We all like", "cache_salt": gateway}
    for _ in range(2):
        plain, repetition = (
            demo_system.send(variants[name].changed(**repeating), gateway=gateway).text
            for name in ("{}", "{'repetition_penalty': 10.0}")
        )
        assert plain == " Paris" != repetition


# --- PD-02: log probabilities over two workers --------------------------------------------------------


def test_pd_02_logprobs_from_the_first_token_on(demo_system: System, demo_cases: Mapping[str, Case]) -> None:
    system, case = demo_system, demo_cases["PD-02"]
    replies = system.run(case)
    for name in ("stream False", "stream True"):
        entries = replies[name].logprobs
        for entry in entries:
            assert len(entry["top_logprobs"]) == 5
            assert entry["logprob"] in [
                top["logprob"] for top in entry["top_logprobs"] if top["token"] == entry["token"]
            ]
    assert len(replies["stream False"].logprobs) == replies["stream False"].usage["completion_tokens"]
    assert replies["stream True"].logprobs == replies["stream False"].logprobs
    echoed = replies["echo"]
    assert len(echoed.logprobs) == 5 + echoed.usage["completion_tokens"]
    assert echoed.logprobs[0][1] is None and all(entry[1] is not None for entry in echoed.logprobs[1:])
    two = [logprob_entries(choice) for choice in replies["n=2"].json["choices"]]
    assert len(two) == 2 and sum(map(len, two)) == replies["n=2"].usage["completion_tokens"]
    for name, variant in case.variants.items():
        monolithic = system.send(variant.changed(cache_salt="pd-02"), gateway=MONOLITH)
        apart, whole = flat(replies[name]), flat(monolithic)
        assert [token for token, _, _, _ in apart] == [token for token, _, _, _ in whole]
        assert [offset for *_, offset in apart] == [offset for *_, offset in whole]
        for (_, value, top, _), (_, expected, expected_top, _) in zip(apart, whole, strict=True):
            assert value == (expected if expected is None else pytest.approx(expected, abs=1e-3))
            assert top == (None if expected_top is None else pytest.approx(expected_top, abs=1e-3))
    replies.assert_all_judged()


def flat(reply: Reply) -> list[tuple[str, float | None, Any, int | None]]:
    """(token, value, alternatives, offset) of all choices; chats have no offsets."""
    choices = [c for chunk in reply.chunks for c in chunk["choices"]] if reply.is_stream else reply.json["choices"]
    entries = [entry for choice in choices for entry in logprob_entries(choice)]
    if entries and isinstance(entries[0], dict):
        return [
            (e["token"], e["logprob"], {t["token"]: t["logprob"] for t in e["top_logprobs"]}, None) for e in entries
        ]
    return entries


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


def test_so_03_heavy_grammars_take_nothing_from_others(demo_system: System) -> None:
    system = demo_system
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
    assert max(slowest) < 30
    eventually(lambda: busy_processors(system.pids.values()) < 0.5, what="idle processors")
    assert memory_of(system) < memory + 200 * MIB


def assert_answered(reply: Reply) -> None:
    """Documented: a grammar that takes more than 2 s of compute to compile is refused."""
    assert reply.status in (200, 400), reply
    assert reply.status == 200 or reply.error["message"]
    assert reply.seconds < PATIENCE


def leave_soon(system: System, variant: Variant) -> None:
    with RawStream(system, variant.changed(stream=True)):
        pass


@contextmanager
def polled_health(system: System) -> Iterator[list[float]]:
    """Seconds that /health took, one after the other; every answer is 200."""
    seconds, over = [0.0], threading.Event()

    def poll() -> None:
        while not over.wait(0.2):
            answer = system.get("/health")
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


# --- SO-04, SO-05: grammars and tokens of many letters -------------------------------------------------


def test_so_04_a_short_match(demo_system: System, demo_cases: Mapping[str, Case]) -> None:
    short = demo_system.send(demo_cases["SO-04"].variants["short match"])
    assert short.text in ("yes", "no")
    assert short.finish_reason == "stop" and short.usage["completion_tokens"] <= 3
    demo_system.assert_twin_agrees(short)


def test_so_05_each_choice_can_be_reached(
    demo_system: System, demo_cases: Mapping[str, Case], demo_model: Path
) -> None:
    first = next(iter(demo_cases["SO-05"].variants.values()))
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    (york,), (city,) = (tokenizer.encode(word).ids for word in (" York", " City"))
    forced = {"New": {END: 100}, "New York": {york: 100, END: 60}, "New York City": {york: 100, city: 100, END: 60}}
    for text, bias in forced.items():
        reply = demo_system.send(first.changed(logit_bias={str(id_): value for id_, value in bias.items()}))
        assert (reply.text, reply.finish_reason) == (text, "stop")
