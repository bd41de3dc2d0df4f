"""Tools for models whose chat template knows none: described in the system message, calls and results as text."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from gateway.chat.tools.format import ToolFormat

Message = Mapping[str, Any]


def without_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format_: ToolFormat
) -> list[Message]:
    """The same conversation with nothing but words in it.

    Args:
        messages: as templates with tools take them.
        tools: functions that may be called, as templates take them.
        format_: how the model is to write calls, and is shown its earlier ones.
    """
    spoken: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            spoken.append({"role": "user", "content": _results(group)})
        else:
            spoken += [_spoken(message, format_) for message in group]
    if not tools:
        return spoken
    instruction = _instruction(tools, format_)
    if spoken[0]["role"] == "system":
        first = {**spoken[0], "content": f"{spoken[0]['content']}\n\n{instruction}".lstrip("\n")}
        return [first, *spoken[1:]]
    return [{"role": "system", "content": instruction}, *spoken]


def _spoken(message: Message, format_: ToolFormat) -> Message:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    if not calls:
        return message
    words = [message["content"]] if message["content"] else []
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join([*words, format_.written(calls)])}


def _results(messages: Iterable[Message]) -> str:
    return "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in messages)


def _instruction(tools: Sequence[Mapping[str, Any]], format_: ToolFormat) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = format_.written([("function-name", {"argument-name": "value"})])
    return (
        "You have functions that you can call when they help you to answer. Each line describes one of them:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "To call a function, reply with its name and its arguments as JSON, in exactly this form:\n"
        f"{example}\n"
        "The results then come back to you between <tool_response> and </tool_response>. "
        "If no function is needed, answer in words."
    )
