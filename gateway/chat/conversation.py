"""A conversation, checked and in the form that chat templates expect. Knows no API and no template."""

from collections.abc import Callable, Sequence
from typing import Any

from common.errors import InvalidRequest
from gateway.chat.fields import ChatFields
from gateway.chat.request import ToolCall, Turn
from gateway.chat.tools.format import parsed_arguments

Message = dict[str, Any]

#: What clients may write, and what the template sees. `developer` is OpenAI's newer word for `system`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def template_messages(
    turns: Sequence[Turn], fields: ChatFields, template_id: Callable[[str], str] = lambda call_id: call_id
) -> list[Message]:
    """Messages as Hugging Face's templates take them.

    Content is always a string: templates that join it to others fail on null. Calls are
    `{"id", "type", "function": {"name", "arguments"}}` with arguments as an object, or as text if they spell none.
    A tool's message has the name of the function that it answers for, if the call is there.

    Args:
        template_id: a call's id as the model's templates want it.

    Raises InvalidRequest naming the field.
    """
    if not turns:
        raise InvalidRequest(f"{fields.messages} must not be empty", field=fields.messages)
    names: dict[str, str] = {}
    messages = []
    for index, turn in enumerate(turns):
        _check_turn(turn, fields.turn(index), fields)
        names |= {call.id: call.name for call in turn.tool_calls}
        messages.append(_template_message(turn, names, template_id))
    return messages


def _check_turn(turn: Turn, field: str, fields: ChatFields) -> None:
    if turn.role not in ROLES:
        known = ", ".join(ROLES)
        hint = "; the result of a function has role tool" if turn.role == "function" else ""
        raise InvalidRequest(f"{field}.role must be one of {known}{hint}", field=f"{field}.role")
    if turn.content is None and not turn.tool_calls:
        raise InvalidRequest(f"{field}.content is missing", field=f"{field}.content")
    if turn.tool_calls and turn.role != "assistant":
        raise InvalidRequest(f"{field}.tool_calls belong to role assistant", field=f"{field}.tool_calls")
    if turn.role == "tool" and not turn.tool_call_id:
        raise InvalidRequest(f"{field}.tool_call_id is missing", field=f"{field}.tool_call_id")
    if turn.role != "tool" and turn.tool_call_id is not None:
        raise InvalidRequest(f"{field}.tool_call_id belongs to role tool", field=f"{field}.tool_call_id")
    for index, call in enumerate(turn.tool_calls):
        _check_call(call, f"{field}.tool_calls[{index}]", fields.function)


def _check_call(call: ToolCall, field: str, function: str) -> None:
    if not call.id:
        raise InvalidRequest(f"{field}.id is missing", field=f"{field}.id")
    if not call.name:
        raise InvalidRequest(f"{field}{function}.name is missing", field=f"{field}{function}.name")


def _template_message(turn: Turn, names: dict[str, str], template_id: Callable[[str], str]) -> Message:
    assert turn.role is not None, "checked"
    message: Message = {"role": ROLES[turn.role], "content": turn.content or ""}
    if turn.reasoning_content is not None:
        message["reasoning_content"] = turn.reasoning_content
    if turn.tool_calls:
        message["tool_calls"] = [_template_call(call, template_id) for call in turn.tool_calls]
    if turn.tool_call_id is not None:
        message["tool_call_id"] = template_id(turn.tool_call_id)
    name = turn.name or names.get(turn.tool_call_id or "")
    if name is not None:
        message["name"] = name
    return message


def _template_call(call: ToolCall, template_id: Callable[[str], str]) -> Message:
    function = {"name": call.name, "arguments": parsed_arguments(call.arguments)}
    return {"id": template_id(call.id), "type": "function", "function": function}
