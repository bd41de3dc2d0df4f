"""Prompt ids for every edge: from text, from ids, from a conversation; long texts off the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.text.chat_prompt import ChatPrompt, encode_chat
from gateway.chat.conversation import template_messages
from gateway.chat.fields import ChatFields
from gateway.chat.request import ChatInput, Turn
from gateway.generation import ServingLimits
from gateway.serving import ServingModel

#: Longer texts are tokenized in a thread, so that other streams go on meanwhile.
_INLINE_CHARACTERS = 8192


async def text_ids(model: ServingModel, text: str, limits: ServingLimits, *, field: str) -> list[int]:
    """Ids of a prompt given as text, the model's begin token included. Raises ContextTooLong."""
    return await _offload(lambda: model.encode_text(text, limits.max_request_tokens, field=field), len(text))


async def chat_ids(
    model: ServingModel,
    turns: Sequence[Turn],
    limits: ServingLimits,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a conversation in the model's template. Raises InvalidRequest naming `messages…`, ContextTooLong."""
    messages = template_messages(turns)
    characters = sum(len(message["content"]) for message in messages)
    model.check_length(characters, limits.max_request_tokens, field="messages")

    def encode() -> list[int]:
        return encode_chat(
            model.tokenizer,
            model.template,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    return await _offload(encode, characters)


async def chat_prompt(
    model: ServingModel,
    chat: ChatInput,
    limits: ServingLimits,
    fields: ChatFields = ChatFields(),  # noqa: B008 - a frozen value
) -> ChatPrompt:
    """The prompt of a chat request, tools and all, as ids and as text. Raises InvalidRequest, ContextTooLong."""
    ids = await chat_ids(
        model,
        chat.turns,
        limits,
        add_generation_prompt=chat.add_generation_prompt is not False,
        variables=chat.template_variables,
    )
    return ChatPrompt(ids, model.tokenizer.decode(ids, skip_special_tokens=False))


async def _offload(work: Callable[[], list[int]], characters: int) -> list[int]:
    return work() if characters <= _INLINE_CHARACTERS else await asyncio.to_thread(work)
