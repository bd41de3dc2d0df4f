"""Tools and tool choice of the Responses API, as values and as they are shown again. Functions only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from gateway.chat.request import Tool, ToolChoice, ToolMode
from gateway.http.formats import Json
from gateway.http.responses.schemas import ResponseTool
from gateway.json_text import is_finite

_MODES = {mode.value: mode for mode in ToolMode}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What of a request is about tools."""

    tools: tuple[Tool, ...]
    #: For each tool the field that it is from, for complaints.
    names: tuple[str, ...]
    choice: ToolChoice | None
    parallel: bool


def tool_use(tools: Sequence[ResponseTool], choice: str | Mapping[str, Any] | None, parallel: bool | None) -> ToolUse:
    """Raises InvalidRequest naming `tools[i].…` or `tool_choice…`."""
    _check_finite("tool_choice", choice)
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    if not functions and choice == ToolMode.AUTO.value:
        # This API's default, which clients also send without tools.
        choice = None
    allowed = _allowed(choice, {function.name for function in functions})
    kept = [index for index, function in enumerate(functions) if allowed is None or function.name in allowed]
    return ToolUse(
        tools=tuple(functions[index] for index in kept),
        names=tuple(f"tools[{index}]" for index in kept),
        choice=_choice(choice),
        parallel=parallel is not False,
    )


def _function(field: str, tool: ResponseTool) -> Tool:
    if tool.type != "function":
        message = f"{field}.type: {tool.type[:64]} is not supported, only function"
        raise InvalidRequest(message, field=f"{field}.type", code="unsupported_parameter")
    if not tool.name:
        raise InvalidRequest(f"{field}.name is missing", field=f"{field}.name")
    _check_finite(f"{field}.parameters", tool.parameters)
    return Tool(tool.name, tool.description, tool.parameters, strict=bool(tool.strict))


def _check_finite(field: str, value: object) -> None:
    """It is shown again in the answer."""
    if not is_finite(value):
        raise InvalidRequest(f"{field} has a number beyond what a number can be", field=field)


def _choice(choice: str | Mapping[str, Any] | None) -> ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        return ToolChoice(_mode("tool_choice", choice))
    if choice.get("type") == "function":
        return ToolChoice(ToolMode.REQUIRED, function=_name("tool_choice.name", choice.get("name")))
    if choice.get("type") == "allowed_tools":
        return ToolChoice(_mode("tool_choice.mode", choice.get("mode")))
    raise InvalidRequest(
        "tool_choice.type: only function and allowed_tools are supported",
        field="tool_choice.type",
        code="unsupported_parameter",
    )


def _mode(field: str, mode: object) -> ToolMode:
    if not isinstance(mode, str) or mode not in _MODES:
        raise InvalidRequest(f"{field} must be one of {', '.join(_MODES)}, or name a function", field=field)
    return _MODES[mode]


def _allowed(choice: str | Mapping[str, Any] | None, known: set[str]) -> set[str] | None:
    """Names of the functions that `allowed_tools` leaves; None: all of them."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    entries = choice.get("tools")
    if not isinstance(entries, list) or not entries:
        raise InvalidRequest("tool_choice.tools must be a list of tools", field="tool_choice.tools")
    allowed = set()
    for index, entry in enumerate(entries):
        field = f"tool_choice.tools[{index}]"
        name = _name(f"{field}.name", entry.get("name") if isinstance(entry, Mapping) else None)
        if name not in known:
            raise InvalidRequest(f"{field}.name is not the name of a tool", field=f"{field}.name")
        allowed.add(name)
    return allowed


def _name(field: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field} is missing", field=field)
    return name


def tool_json(tool: ResponseTool) -> Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
