"""Input items: checked and brought into one form, and from there the turns of a conversation.

The one form is that in which items are stored, listed and continued from. Each item has an id; a message's content is a
list of parts, whichever way the client wrote it.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequest
from gateway.chat.request import ToolCall, Turn
from gateway.http.formats import Json
from gateway.http.responses.schemas import InputItem, InputPart

_ROLES = frozenset({"user", "assistant", "system", "developer"})
#: What a part is called where it is text, and the field that holds it.
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING_PARTS = frozenset({"reasoning_text", "summary_text", "text"})


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def read_input(given: str | Sequence[InputItem]) -> list[Json]:
    """The items of a request in the one form. Raises InvalidRequest naming `input[i].…`."""
    if isinstance(given, str):
        return [_message(new_id("msg"), "user", given)]
    if not given:
        raise InvalidRequest("input must not be empty", field="input")
    return [_read_item(f"input[{index}]", item) for index, item in enumerate(given)]


def _read_item(name: str, item: InputItem) -> Json:
    kind = item.type or ("message" if item.role is not None else "item_reference" if item.id is not None else None)
    if kind == "message":
        return _read_message(name, item)
    if kind == "function_call":
        return _read_call(name, item)
    if kind == "function_call_output":
        return _read_output(name, item)
    if kind == "reasoning":
        return _read_reasoning(name, item)
    if kind is None:
        raise InvalidRequest(f"{name}.type is missing", field=f"{name}.type")
    raise InvalidRequest(
        f"{name}.type: {kind[:64]} is not supported", field=f"{name}.type", code="unsupported_parameter"
    )


def _read_message(name: str, item: InputItem) -> Json:
    if item.role not in _ROLES:
        raise InvalidRequest(f"{name}.role must be one of {', '.join(sorted(_ROLES))}", field=f"{name}.role")
    if item.content is None:
        raise InvalidRequest(f"{name}.content is missing", field=f"{name}.content")
    return _message(item.id or new_id("msg"), item.role, _text(f"{name}.content", item.content))


def _message(id_: str, role: str, text: str) -> Json:
    part: Json = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": id_, "type": "message", "role": role, "status": "completed", "content": [part]}


def _read_call(name: str, item: InputItem) -> Json:
    return {
        "id": item.id or new_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": _required(f"{name}.call_id", item.call_id),
        "name": _required(f"{name}.name", item.name),
        "arguments": "{}" if item.arguments is None else item.arguments,
    }


def _read_output(name: str, item: InputItem) -> Json:
    if item.output is None:
        raise InvalidRequest(f"{name}.output is missing", field=f"{name}.output")
    return {
        "id": item.id or new_id("fco"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": _required(f"{name}.call_id", item.call_id),
        "output": _text(f"{name}.output", item.output),
    }


def _read_reasoning(name: str, item: InputItem) -> Json:
    """The reasoning itself if it is there, else its summary; what only its provider can decrypt is left out."""
    parts = item.content or item.summary or []
    if isinstance(parts, str):
        raise InvalidRequest(f"{name}.content must be a list of parts", field=f"{name}.content")
    for index, part in enumerate(parts):
        if part.type not in _REASONING_PARTS or part.text is None:
            field_ = f"{name}.{'content' if item.content else 'summary'}[{index}]"
            raise InvalidRequest(f"{field_} is no text of reasoning", field=field_)
    content = [{"type": "reasoning_text", "text": part.text} for part in parts]
    return {
        "id": item.id or new_id("rs"),
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": content,
    }


def _required(name: str, value: str | None) -> str:
    if not value:
        raise InvalidRequest(f"{name} is missing", field=name)
    return value


def _text(name: str, content: str | Sequence[InputPart]) -> str:
    """Parts are joined without anything between them."""
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{name} has no parts", field=name)
    return "".join(_part_text(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part_text(name: str, part: InputPart) -> str:
    key = _TEXT_PARTS.get(part.type)
    if key is None:
        message = f"{name}.type: {part.type[:64]} is not supported, only text"
        raise InvalidRequest(message, field=f"{name}.type", code="unsupported_parameter")
    value = part.text if key == "text" else part.refusal
    if value is None:
        raise InvalidRequest(f"{name}.{key} is missing", field=f"{name}.{key}")
    return value


@dataclass(slots=True)
class _OpenTurn:
    """An assistant's turn that further items may belong to."""

    name: str
    content: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str | None = None

    def closed(self) -> Turn:
        content = self.content if self.content is not None or self.calls else ""
        return Turn("assistant", content, tool_calls=tuple(self.calls), reasoning_content=self.reasoning)


class Conversation:
    """Turns out of items: an assistant's reasoning, words and calls that follow each other are one turn.

    Reasoning that nothing of the assistant follows is left out: a turn of reasoning alone is none.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        #: For each turn the field that it is from, for complaints.
        self.names: list[str] = []
        self._open: _OpenTurn | None = None
        self._reasoning: str | None = None
        self._calls: set[str] = set()

    def instruct(self, instructions: str) -> None:
        self._add("instructions", Turn("system", instructions))

    def extend(self, items: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        """Items in the one form, each with the name of its field. Raises InvalidRequest for a result without a call."""
        for item, name in zip(items, names, strict=True):
            self._extend(item, name)

    def close(self) -> None:
        """No item follows."""
        self._close()

    def _extend(self, item: Mapping[str, Any], name: str) -> None:
        kind = item["type"]
        if kind == "reasoning":
            earlier = self._reasoning or ""
            self._close()
            self._reasoning = earlier + "".join(part["text"] for part in item["content"]) or None
        elif kind == "function_call":
            self._calls.add(item["call_id"])
            self._assistant(name).calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
        elif kind == "function_call_output":
            if item["call_id"] not in self._calls:
                field = f"{name}.call_id"
                raise InvalidRequest(f"{field}: no function_call with this id comes before it", field=field)
            self._add(name, Turn("tool", item["output"], tool_call_id=item["call_id"]))
        elif item["role"] == "assistant":
            if self._open is not None:
                self._close()
            self._assistant(name).content = _content(item)
        else:
            self._add(name, Turn(item["role"], _content(item)))

    def _assistant(self, name: str) -> _OpenTurn:
        if self._open is None:
            self._open = _OpenTurn(name, reasoning=self._reasoning)
            self._reasoning = None
        return self._open

    def _add(self, name: str, turn: Turn) -> None:
        self._close()
        self.turns.append(turn)
        self.names.append(name)

    def _close(self) -> None:
        self._reasoning = None
        if self._open is not None:
            self.turns.append(self._open.closed())
            self.names.append(self._open.name)
            self._open = None


def _content(item: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])
