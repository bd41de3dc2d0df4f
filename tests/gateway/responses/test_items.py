"""Input items in their one form, and the turns that they make."""

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from common.errors import InvalidRequest
from gateway.chat.request import ToolCall, Turn
from gateway.http.responses.items import Conversation, read_input
from gateway.http.responses.schemas import InputItem

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
CALL_2 = CALL | {"call_id": "c2"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
WORDS = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def read(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return read_input([InputItem.model_validate(item) for item in items])


def turns(*items: dict[str, Any]) -> list[Turn]:
    conversation = Conversation()
    conversation.extend(read(*items), [f"input[{index}]" for index in range(len(items))])
    conversation.close()
    assert len(conversation.names) == len(conversation.turns)
    return conversation.turns


@pytest.mark.parametrize("item", [USER, CALL, RESULT, WORDS, THOUGHT, USER | {"role": "developer"}])
def test_the_one_form_is_what_the_client_lists(item: dict[str, Any]) -> None:
    (stored,) = read(item)
    TypeAdapter(ResponseItem).validate_python(stored)
    assert read(stored) == [stored], "reading it again changes nothing"


def test_given_ids_are_kept_and_others_drawn() -> None:
    first, second = read(USER | {"id": "msg_mine"}, USER)
    assert first["id"] == "msg_mine"
    assert second["id"].startswith("msg_")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        ([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], "ab"),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_content(content: Any, text: str) -> None:
    assert turns({"role": "user", "content": content}) == [Turn("user", text)]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([USER], [Turn("user", "hi")]),
        ([USER | {"role": "developer"}, USER], [Turn("developer", "hi"), Turn("user", "hi")]),
        ([WORDS], [Turn("assistant", "so")]),
        ([WORDS, WORDS], [Turn("assistant", "so"), Turn("assistant", "so")]),
        (
            [CALL, CALL_2, RESULT],
            [
                Turn("assistant", None, tool_calls=(ToolCall("c1", "f", '{"x": 1}'), ToolCall("c2", "f", '{"x": 1}'))),
                Turn("tool", "42", tool_call_id="c1"),
            ],
        ),
        (
            [THOUGHT, WORDS, CALL],
            [Turn("assistant", "so", tool_calls=(ToolCall("c1", "f", '{"x": 1}'),), reasoning_content="hm")],
        ),
        ([THOUGHT, THOUGHT, WORDS], [Turn("assistant", "so", reasoning_content="hmhm")]),
        (
            [CALL, RESULT, CALL_2],
            [
                Turn("assistant", None, tool_calls=(ToolCall("c1", "f", '{"x": 1}'),)),
                Turn("tool", "42", tool_call_id="c1"),
                Turn("assistant", None, tool_calls=(ToolCall("c2", "f", '{"x": 1}'),)),
            ],
        ),
        ([THOUGHT, USER], [Turn("user", "hi")]),
        ([USER, THOUGHT], [Turn("user", "hi")]),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}, WORDS],
            [Turn("assistant", "so", reasoning_content="in short")],
        ),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, WORDS], [Turn("assistant", "so")]),
        (
            [CALL, {**RESULT, "output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]}],
            [
                Turn("assistant", None, tool_calls=(ToolCall("c1", "f", '{"x": 1}'),)),
                Turn("tool", "42", tool_call_id="c1"),
            ],
        ),
    ],
)
def test_turns(items: list[dict[str, Any]], expected: list[Turn]) -> None:
    assert turns(*items) == expected


@pytest.mark.parametrize(
    ("item", "field", "code"),
    [
        ({"content": "x"}, "input[0].type", None),
        ({"type": "message", "content": "x"}, "input[0].role", None),
        ({"role": "tool", "content": "x"}, "input[0].role", None),
        ({"role": "user"}, "input[0].content", None),
        ({"role": "user", "content": []}, "input[0].content", None),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text", None),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content[0].type",
            "unsupported_parameter",
        ),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type", "unsupported_parameter"),
        ({"id": "msg_1"}, "input[0].type", "unsupported_parameter"),
        ({"type": "computer_call"}, "input[0].type", "unsupported_parameter"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id", None),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[0].name", None),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id", None),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output", None),
        ({"type": "reasoning", "content": "x"}, "input[0].content", None),
        ({"type": "reasoning", "content": [{"type": "input_image"}]}, "input[0].content[0]", None),
    ],
)
def test_what_is_wrong_is_named(item: dict[str, Any], field: str, code: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(item)
    assert (caught.value.field, caught.value.code) == (field, code)


@pytest.mark.parametrize("items", [[RESULT], [RESULT, CALL], [CALL_2, RESULT]])
def test_a_result_follows_its_call(items: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        turns(*items)
    assert caught.value.field == f"input[{items.index(RESULT)}].call_id"


def test_no_items() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read()
    assert caught.value.field == "input"
