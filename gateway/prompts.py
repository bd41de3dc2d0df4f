"""Prompt ids for every edge: from text, from ids, from a conversation; long texts off the event loop."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from common.errors import InvalidRequest
from common.text.chat_prompt import ChatPrompt, encode_chat
from gateway.chat.conversation import template_messages
from gateway.chat.fields import ChatFields
from gateway.chat.request import ChatInput
from gateway.chat.tools.check import ToolUse, check_tools
from gateway.chat.tools.format import template_tool
from gateway.chat.tools.hermes import HermesFormat
from gateway.chat.tools.plain_template import without_tools
from gateway.generation import ServingLimits
from gateway.off_loop import LONG, off_loop
from gateway.serving import ServingModel

#: What a turn or a call costs beyond its text, in characters.
_TURN = 64


async def text_ids(model: ServingModel, text: str, limits: ServingLimits, *, field: str) -> list[int]:
    """Ids of a prompt given as text, the model's begin token included. Raises ContextTooLong."""
    return await off_loop(lambda: model.encode_text(text, limits.max_request_tokens, field=field), len(text))


async def chat_prompt(
    model: ServingModel,
    chat: ChatInput,
    limits: ServingLimits,
    fields: ChatFields = ChatFields(),  # noqa: B008 - a frozen value
) -> ChatPrompt:
    """The prompt of a chat request, tools and all. Raises InvalidRequest naming the field, ContextTooLong."""
    return await render_chat(model, chat, check_tools(chat, fields), limits, fields)


async def render_chat(
    model: ServingModel, chat: ChatInput, use: ToolUse, limits: ServingLimits, fields: ChatFields
) -> ChatPrompt:
    """As `chat_prompt`, with tools that are checked already."""
    if use.tools and model.tool_format is None:
        message = "tools: it is not known how this model writes calls; the gateway's --tool-parser can say"
        raise InvalidRequest(message, field="tools", code="unsupported_parameter")
    format_ = model.tool_format or HermesFormat()

    def encode() -> ChatPrompt:
        messages: Sequence[Mapping[str, Any]] = template_messages(chat.turns, fields, format_.template_id)
        generation_prompt = _generation_prompt(chat, fields)
        tools: Sequence[Mapping[str, Any]] | None = [template_tool(tool) for tool in use.tools] or None
        if not model.template.knows("tools"):
            messages, tools = without_tools(messages, tools or (), format_), None
        characters = _characters(messages) + _characters(tools)
        model.check_length(characters, limits.max_request_tokens, field=fields.messages)
        return encode_chat(
            model.tokenizer,
            model.template,
            messages,
            add_generation_prompt=generation_prompt,
            tools=tools,
            variables=chat.template_variables,
            continue_final_message=chat.continue_final_message,
        )

    with _named(fields):
        return await off_loop(encode, _size(chat))


def _size(chat: ChatInput) -> int:
    """About the characters that there are to work on; whoever counts them all has done some of the work."""
    if chat.tools or chat.template_variables:
        return LONG
    return sum(len(turn.content or "") + len(turn.reasoning_content or "") + _TURN for turn in chat.turns) + sum(
        len(call.arguments) + _TURN for turn in chat.turns for call in turn.tool_calls
    )


def _generation_prompt(chat: ChatInput, fields: ChatFields) -> bool:
    """Whether the prompt opens the assistant's turn. Raises InvalidRequest if the final message cannot be continued."""
    if not chat.continue_final_message:
        return chat.add_generation_prompt is not False
    field = "continue_final_message"
    if chat.add_generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt exclude each other", field=field)
    final = chat.turns[-1]
    if final.role != "assistant" or final.content is None or final.tool_calls:
        message = f"continue_final_message: {fields.messages} must end with words of the assistant"
        raise InvalidRequest(message, field=field)
    return False


def _characters(value: Any) -> int:
    """Of all strings, at any depth."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(key) + _characters(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0


@contextmanager
def _named(fields: ChatFields) -> Iterator[None]:
    """The template's complaints in the words of the API."""
    names = {"messages": fields.messages, "chat_template_kwargs": fields.template_variables}
    try:
        yield
    except InvalidRequest as error:
        error.field = names.get(error.field or "", error.field)
        raise
