"""CT: what a conversation becomes in the prompt, and calls of tools that are calls."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cases.case_data import Case, Json, Variant, post
from tests.cases.replies import Reply
from tests.cases.system import CONTROL, System
from tests.e2e.cluster import PATIENCE, running_cluster
from tests.factories.served_model import MAX_LENGTH, WORKER_MEMORY, write_served_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: The end token.
END = "2"
SYSTEM_TURN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def rendered(user: str, assistant: str) -> str:
    """By hand as the template has it, with the answer begun."""
    return f"{SYSTEM_TURN}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}"


# --- CT-01: answers that are to be continued ----------------------------------------------------------


def test_ct_01_a_begun_answer_is_continued(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["CT-01"])
    for name, reply in replies.items():
        if name == "both flags":
            assert reply.status == 400
            assert reply.error["param"] in ("continue_final_message", "add_generation_prompt")
        else:
            user, assistant = (message["content"] for message in reply.variant.body["messages"])
            by_hand = system.complete(rendered(user, assistant), max_tokens=16)
            assert reply.text == by_hand.text, name
            assert reply.usage["prompt_tokens"] == by_hand.usage["prompt_tokens"], name
        system.assert_twin_agrees(reply)
    replies.assert_all_judged()


# --- CT-02: tool_choice -------------------------------------------------------------------------------


def calls_of(reply: Reply) -> list[Json]:
    """Tool calls of the only choice, as a client puts them together."""
    if not reply.is_stream:
        (choice,) = reply.json["choices"]
        return list(choice["message"].get("tool_calls") or ())
    calls: dict[int, Json] = {}
    for choice in reply.of_choice(0):
        for delta in choice["delta"].get("tool_calls") or ():
            call = calls.setdefault(delta["index"], {"id": delta.get("id"), "function": {"name": "", "arguments": ""}})
            for part, text in delta["function"].items():
                call["function"][part] += text or ""
    return [calls[index] for index in sorted(calls)]


def assert_fits(call: Json, tools: list[Json]) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    assert call["id"]
    assert call["function"]["name"] in schemas
    jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


def assert_called(reply: Reply) -> None:
    """At least one call, each one of a tool and fit for it; the last one may be cut off with the answer."""
    assert reply.status == 200, reply
    calls = calls_of(reply)
    assert calls, reply
    if reply.finish_reason == "length":
        assert reply.is_stream or reply.usage["completion_tokens"] == reply.variant.body["max_tokens"]
        calls = calls[:-1]
    else:
        assert reply.finish_reason == "tool_calls", reply
    for call in calls:
        assert_fits(call, reply.variant.body["tools"])


def test_ct_02_tool_choice_is_kept(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["CT-02"])
    for name in ("required", "required, streamed", "named", "one call at most"):
        assert_called(replies[name])
    # The small model repeats itself until it is cut off. Urged to end, it ends where a call is complete.
    for name in ("required", "required, streamed"):
        ended = system.send(replies[name].variant.changed(logit_bias={END: 100}))
        assert ended.finish_reason == "tool_calls" and len(calls_of(ended)) == 1
        assert_called(ended)
    assert [call["function"]["name"] for call in calls_of(replies["named"])] == ["get_time"]
    assert len(calls_of(replies["one call at most"])) == 1
    # Documented: anything but "none" needs tools.
    for name in ("required, tools []", "required, tools [], streamed", "named, unknown", "auto without tools"):
        assert replies[name].status == 400 and not replies[name].is_stream
        assert replies[name].error["param"].startswith("tool"), replies[name]
    for name in ("none", "tools [] alone"):
        assert replies[name].status == 200
        assert not calls_of(replies[name])
    for reply in replies.values():
        if reply.status == 200:
            assert reply.finish_reason != "tool_calls" or calls_of(reply)
        system.assert_twin_agrees(reply, same_text=False)
    replies.assert_all_judged()


# --- CT-03: turns with calls and without content ------------------------------------------------------


def test_ct_03_calls_without_content(system: System, cases: Mapping[str, Case]) -> None:
    case = cases["CT-03"]
    replies = system.run(case)
    same = [replies[name] for name in ("null", "no key", "empty")]
    assert len({reply.text for reply in same}) == 1
    assert len({reply.usage["prompt_tokens"] for reply in same}) == 1
    # The call is in the prompt: without it (its answer told by the user) the prompt is shorter.
    question, _, answer = case.variants["null"].body["messages"]
    told = {"role": "user", "content": answer["content"]}
    without = system.send(case.variants["null"].changed(messages=[question, told]))
    assert same[0].usage["prompt_tokens"] > without.usage["prompt_tokens"]
    assert replies["empty assistant turn"].status == 200
    nothing = replies["assistant null without calls"]
    assert nothing.status == 400 and nothing.error["param"].startswith("messages[1]")
    for reply in replies.values():
        system.assert_twin_agrees(reply)
    replies.assert_all_judged()


# --- CT-04: templates that raise ----------------------------------------------------------------------


def test_ct_04_what_templates_do_not_know(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["CT-04"])
    for name in ("unknown role", "role null"):
        assert replies[name].status == 400
        assert replies[name].error["param"].startswith("messages[0]"), replies[name]
    broken = replies["kwargs that break rendering"]
    assert broken.status == 400 and broken.error["param"].startswith("chat_template_kwargs")
    # Documented: developer becomes system.
    developer = replies["developer role"]
    messages = developer.variant.body["messages"]
    as_system = [{**turn, "role": turn["role"].replace("developer", "system")} for turn in messages]
    same = system.send(developer.variant.changed(messages=as_system))
    assert developer.usage["prompt_tokens"] == same.usage["prompt_tokens"]
    for name in ("two system turns", "only system", "tool turn without a call"):
        assert replies[name].status in (200, 400), replies[name]
    for reply in replies.values():
        assert reply.seconds < PATIENCE
        system.assert_twin_agrees(reply, same_text=False)
    for _ in range(20):
        assert system.send(CONTROL).text == system.control_text
    replies.assert_all_judged()


@contextmanager
def templated(folder: Path, scratch: Path, template: str | None) -> Iterator[System]:
    """The tiny model with another template, or with none; a decode worker is enough to serve it."""
    write_served_model(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings.pop("chat_template")
    if template is not None:
        settings["chat_template"] = template
    file.write_text(json.dumps(settings), encoding="utf-8")
    with running_cluster(folder, scratch, prefill=0, worker_options=WORKER_MEMORY) as cluster:
        yield System.fresh(cluster, context=MAX_LENGTH)


@pytest.mark.parametrize(
    ("template", "message"), [("{{ raise_exception('no such turn') }}", "no such turn"), (None, "template")]
)
def test_ct_04_a_model_that_cannot_chat(tmp_path: Path, scratch: Path, template: str | None, message: str) -> None:
    with templated(tmp_path, scratch, template) as system:
        for stream in (False, True):
            refused = system.chat([{"role": "user", "content": "hi"}], max_tokens=4, stream=stream)
            assert refused.status == 400 and message in refused.error["message"]
            system.assert_twin_agrees(refused)
        assert system.send(CONTROL).text == system.control_text
        system.assert_alive()


# --- CT-05: content in parts --------------------------------------------------------------------------


def test_ct_05_content_in_parts(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["CT-05"])
    string = replies["string"]
    # Documented: parts are joined without a separator.
    for name in ("one part", "two parts"):
        assert replies[name].text == string.text, name
        assert replies[name].usage["prompt_tokens"] == string.usage["prompt_tokens"], name
    for name in ("no parts", "image part", "unknown part", "part without text", "bare strings"):
        assert replies[name].status == 400, replies[name]
        assert replies[name].error["param"].startswith("messages[0].content"), replies[name]
    replies.assert_all_judged()


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_ct_05_parts_of_other_roles(system: System, role: str) -> None:
    def conversation(content: Any) -> Variant:
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        turns: Mapping[str, Callable[[], list[Json]]] = {
            "system": lambda: [{"role": "system", "content": content}],
            "assistant": lambda: [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}],
            "tool": lambda: [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": content},
            ],
        }
        messages = [*turns[role](), {"role": "user", "content": "Name three fruits."}]
        return post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0})

    string = system.send(conversation("Be brief."))
    parts = system.send(conversation([{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]))
    assert (parts.text, parts.usage["prompt_tokens"]) == (string.text, string.usage["prompt_tokens"])
