"""Checks the tools of a request and settles what the model may call. Knows no format."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest
from gateway.chat.fields import ChatFields
from gateway.chat.request import ChatInput, Tool, ToolChoice, ToolMode

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model sees and may do; no tools: it writes words only."""

    tools: tuple[Tool, ...]
    #: A call must come.
    required: bool = False
    #: The calls must be of these functions: all, or the one that was named.
    callable: tuple[Tool, ...] = ()
    #: More than one call may come.
    parallel: bool = True


def check_tools(chat: ChatInput, fields: ChatFields) -> ToolUse:
    """Tools that must not be called are not shown to the model. Raises InvalidRequest naming the field."""
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}", field="tools")
    _check_functions(chat.tools, fields)
    choice = _choice(chat)
    if choice.mode is ToolMode.NONE:
        return ToolUse(())
    if not chat.tools:
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")
    if choice.function is None:
        required = choice.mode is ToolMode.REQUIRED
        return ToolUse(chat.tools, required, chat.tools, chat.parallel_tool_calls)
    named = tuple(tool for tool in chat.tools if tool.name == choice.function)
    if not named:
        raise InvalidRequest("tool_choice names a function that is not among the tools", field="tool_choice")
    return ToolUse(chat.tools, True, named, False)


def _choice(chat: ChatInput) -> ToolChoice:
    if chat.tool_choice is not None:
        return chat.tool_choice
    return ToolChoice(ToolMode.AUTO if chat.tools else ToolMode.NONE)


def _check_functions(tools: Sequence[Tool], fields: ChatFields) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        field = fields.tool(index) + fields.function
        if not _NAME.fullmatch(tool.name):
            message = f"{field}.name must have 1 to 64 letters, digits, underscores or dashes"
            raise InvalidRequest(message, field=f"{field}.name")
        if tool.name in seen:
            raise InvalidRequest(f"{field}.name: there is another function of that name", field=f"{field}.name")
        seen.add(tool.name)
        if tool.parameters is not None and tool.parameters.get("type", "object") != "object":
            message = f'{field}.parameters must be a JSON schema with "type": "object"'
            raise InvalidRequest(message, field=f"{field}.parameters")
