"""From the messages and tools of a chat completion body to a chat request. Knows no model and no sampling."""

from collections.abc import Sequence

from common.errors import InvalidRequest
from gateway.chat.reasoning import effort_variables
from gateway.chat.request import ChatInput, Tool, ToolCall, ToolChoice, ToolMode, Turn
from gateway.http.refused import refuse_unsupported
from gateway.http.schemas import (
    AllowedTools,
    ChatBody,
    ChatMessage,
    ChosenTool,
    MessageToolCall,
    ToolBody,
    ToolChoiceBody,
)

_MODES = {mode.value: mode for mode in ToolMode}


def chat_input(body: ChatBody, messages: Sequence[ChatMessage]) -> ChatInput:
    """Raises InvalidRequest naming the field."""
    tools = [_tool(index, tool) for index, tool in enumerate(body.tools or ())]
    choice = None
    if body.tool_choice is not None:
        tools, choice = _choice(body.tool_choice, tools)
    return ChatInput(
        turns=tuple(_turn(index, message) for index, message in enumerate(messages)),
        tools=tuple(tools),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_variables=effort_variables(body.reasoning_effort) | (body.chat_template_kwargs or {}),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        separate_reasoning=body.separate_reasoning is not False,
    )


def _turn(index: int, message: ChatMessage) -> Turn:
    refuse_unsupported(message.model_extra, message=index)
    field = f"messages[{index}]"
    content = _content(f"{field}.content", message)
    if content is None and message.role == "assistant":
        content = message.refusal
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    return Turn(
        message.role,
        content,
        message.name,
        tuple(_call(f"{field}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls or ())),
        message.tool_call_id,
        reasoning,
    )


def _content(field: str, message: ChatMessage) -> str | None:
    """Text parts are joined without anything between them."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    if not message.content:
        raise InvalidRequest(f"{field} has no parts", field=field)
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise InvalidRequest(f"{field}[{index}].type: only text is supported", field=f"{field}[{index}].type")
        if part.text is None:
            raise InvalidRequest(f"{field}[{index}].text is missing", field=f"{field}[{index}].text")
    return "".join(part.text or "" for part in message.content)


def _call(field: str, call: MessageToolCall) -> ToolCall:
    _check_type(field, call.type)
    function = call.function
    if function is None:
        raise InvalidRequest(f"{field}.function is missing", field=f"{field}.function")
    return ToolCall(call.id or "", function.name or "", function.arguments or "")


def _check_type(field: str, type_: str | None) -> None:
    if type_ not in (None, "function"):
        raise InvalidRequest(f"{field}.type: only function is supported", field=f"{field}.type")


def _tool(index: int, tool: ToolBody) -> Tool:
    field = f"tools[{index}]"
    _check_type(field, tool.type)
    function = tool.function
    if function is None:
        raise InvalidRequest(f"{field}.function is missing", field=f"{field}.function")
    return Tool(function.name or "", function.description, function.parameters, bool(function.strict))


def _choice(choice: str | ToolChoiceBody, tools: Sequence[Tool]) -> tuple[list[Tool], ToolChoice]:
    """The tools that are left to the model, and what it may do with them."""
    if isinstance(choice, str):
        return list(tools), ToolChoice(_mode("tool_choice", choice))
    if choice.type == "allowed_tools":
        return _allowed(choice.allowed_tools or AllowedTools(), tools)
    return list(tools), ToolChoice(ToolMode.REQUIRED, _chosen_name("tool_choice", choice))


def _mode(field: str, name: str | None) -> ToolMode:
    mode = _MODES.get(name or "")
    if mode is None:
        raise InvalidRequest(f"{field} must be one of {', '.join(_MODES)}, or name a function", field=field)
    return mode


def _allowed(allowed: AllowedTools, tools: Sequence[Tool]) -> tuple[list[Tool], ToolChoice]:
    """Other tools are not shown."""
    field = "tool_choice.allowed_tools"
    if not allowed.tools:
        raise InvalidRequest(f"{field}.tools must not be empty", field=f"{field}.tools")
    names = {_chosen_name(f"{field}.tools[{index}]", tool) for index, tool in enumerate(allowed.tools)}
    if unknown := names.difference(tool.name for tool in tools):
        message = f"{field}.tools: {min(unknown)[:64]!r} is not among the tools"
        raise InvalidRequest(message, field=f"{field}.tools")
    mode = _mode(f"{field}.mode", allowed.mode)
    return [tool for tool in tools if tool.name in names], ToolChoice(mode)


def _chosen_name(field: str, tool: ChosenTool) -> str:
    _check_type(field, tool.type)
    if tool.function is None or not tool.function.name:
        raise InvalidRequest(f"{field}.function.name is missing", field=f"{field}.function.name")
    return tool.function.name
