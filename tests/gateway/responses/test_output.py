"""Items and events out of parts, whichever way tokens come."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.sampling import Candidate, FinishReason, TokenLogprobs
from gateway.chat.answer import ChatAnswer
from gateway.chat.parts import Part, ReasoningPart, TextPart, ToolCallArguments, ToolCallStart
from gateway.completion import ChoiceDelta, TextToken
from gateway.http.json_body import json_pieces
from gateway.http.responses.output import Output


class MarkParser:
    """`<...>` is reasoning, `{name|arguments}` a call, everything else text; every letter is a part of its own."""

    def __init__(self) -> None:
        self.mode = "text"
        self.name = ""
        self.calls = 0

    @property
    def called_tools(self) -> bool:
        return self.calls > 0

    def push(self, text: str) -> list[Part]:
        return [part for letter in text for part in self._letter(letter)]

    def _letter(self, letter: str) -> list[Part]:
        if letter in "<{":
            self.mode = "reasoning" if letter == "<" else "name"
            self.name = ""
        elif letter in ">}":
            self.mode = "text"
        elif self.mode == "name" and letter == "|":
            self.mode = "arguments"
            self.calls += 1
            return [ToolCallStart(self.calls - 1, f"call_{self.calls}", self.name)]
        elif self.mode == "name":
            self.name += letter
        elif self.mode == "arguments":
            return [ToolCallArguments(self.calls - 1, letter)]
        else:
            return [ReasoningPart(letter) if self.mode == "reasoning" else TextPart(letter)]
        return []

    def finish(self) -> list[Part]:
        return []


def letters(text: str) -> list[TextToken]:
    """One token for each letter, then the end token."""
    scored = [TextToken(ord(letter), at, scores(ord(letter))) for at, letter in enumerate(text)]
    return [*scored, TextToken(0, len(text), scores(0))]


def scores(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(Candidate(token_id, -0.5), ())


def deltas(text: str, cuts: Sequence[int]) -> list[ChoiceDelta]:
    """The text in deltas that end after `cuts` tokens, and one for the rest."""
    tokens = letters(text)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    return [
        ChoiceDelta(0, text[a:b], tuple(tokens[a:b]), FinishReason.STOP if b == len(tokens) else None)
        for a, b in pairwise(edges)
    ]


def run(text: str, cuts: Sequence[int] = (), status: str = "completed") -> tuple[Output, list[dict[str, Any]]]:
    output = Output(ChatAnswer(MarkParser), lambda tokens: [{"token": chr(token.token_id)} for token in tokens])
    events = [event for delta in deltas(text, cuts) for event in output.read(delta)]
    return output, plain(events + output.finish(status))


def plain(value: Any) -> Any:
    """As its client reads it."""
    return json.loads(b"".join(json_pieces(value)))


def told(output: Output) -> list[tuple[str, str]]:
    """Kind and text of each item."""
    found = []
    for item in plain(output.json):
        if item["type"] == "function_call":
            found.append((item["name"], item["arguments"]))
        else:
            found.append((item["type"], "".join(part["text"] for part in item["content"])))
    return found


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("hello", [("message", "hello")]),
        ("<why>because", [("reasoning", "why"), ("message", "because")]),
        ("<why>{f|1}", [("reasoning", "why"), ("f", "1")]),
        ("ok {f|1}{g|2}", [("message", "ok "), ("f", "1"), ("g", "2")]),
        ("<a>\n\n{f|}\n{g|}\n", [("reasoning", "a"), ("f", ""), ("g", "")]),
        ("a<b>c", [("message", "a"), ("reasoning", "b"), ("message", "c")]),
        ("<a>\n b", [("reasoning", "a"), ("message", "\n b")]),
        ("", [("message", "")]),
        ("  ", [("message", "  ")]),
        ("<why", [("reasoning", "why")]),
    ],
)
def test_items(text: str, items: list[tuple[str, str]]) -> None:
    output, _ = run(text)
    assert told(output) == items
    assert {item["status"] for item in plain(output.json)} == {"completed"}


TEXT = st.lists(st.sampled_from(["a", " ", "\n", "<x y>", "<>", "{f|12}", "{g|}", "é😀"]), max_size=8).map("".join)


@given(TEXT, st.lists(st.integers(0, 60), max_size=20))
def test_items_do_not_depend_on_deltas_and_events_tell_them(text: str, cuts: list[int]) -> None:
    once, _ = run(text)
    output, events = run(text, cuts)
    assert told(output) == told(once)
    assert replayed(events) == plain(output.json)
    logprobs = [
        part["logprobs"] for item in plain(output.json) if item["type"] == "message" for part in item["content"]
    ]
    assert logprobs == [
        part["logprobs"] for item in plain(once.json) if item["type"] == "message" for part in item["content"]
    ]


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client that only adds deltas up ends with; the final states must agree with that."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items), "items come in order"
            assert event["item"]["status"] == "in_progress"
            items.append({**event["item"]})
            continue
        item = items[event["output_index"]]
        assert event["output_index"] == len(items) - 1, "only the last item grows"
        if kind == "response.output_item.done":
            assert {**item, "status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "response.content_part.added":
            item["content"] = [{**event["part"]}]
        elif kind == "response.content_part.done":
            assert item["content"] == [event["part"]]
        elif kind.endswith("arguments.delta"):
            item["arguments"] += event["delta"]
        elif kind.endswith("arguments.done"):
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        elif kind.endswith(".delta"):
            part = item["content"][event["content_index"]]
            part["text"] += event["delta"]
            if kind == "response.output_text.delta":
                part["logprobs"] = part["logprobs"] + event["logprobs"]
        else:
            assert kind in ("response.output_text.done", "response.reasoning_text.done")
            assert item["content"][0]["text"] == event["text"]
    return items


def test_only_the_last_item_is_incomplete() -> None:
    output, events = run("<a>b{f|12", status="incomplete")
    assert [item["status"] for item in plain(output.json)] == ["completed", "completed", "incomplete"]
    assert events[-1]["item"]["status"] == "incomplete"
    assert events[-2]["arguments"] == "12"


def test_log_probabilities_are_those_of_the_words() -> None:
    output, _ = run("<abc>de", cuts=())
    (message,) = [item for item in plain(output.json) if item["type"] == "message"]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["d", "e", "\0"]


def test_plain_text_has_a_log_probability_for_each_token() -> None:
    output, _ = run(" a b", cuts=(1, 2, 3))
    assert [entry["token"] for entry in plain(output.json)[0]["content"][0]["logprobs"]] == [" ", "a", " ", "b", "\0"]


def test_one_delta_of_text_is_one_event() -> None:
    _, events = run("abcdef", cuts=(3,))
    assert [event["delta"] for event in events if "delta" in event] == ["abc", "def", ""]
