"""From a chat request to what the dispatcher gets and what reads the answer, the same for every API."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.chat.fields import ChatFields
from gateway.chat.parts import AnswerParser
from gateway.chat.plain import PlainParser
from gateway.chat.request import ChatInput
from gateway.generation import ServingLimits
from gateway.options import GenerationOptions
from gateway.prompts import chat_prompt
from gateway.serving import ServingModel
from gateway.validation import PreparedRequest, check_options, prepare


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked chat request."""

    prepared: PreparedRequest
    #: Makes the parser of one choice's text.
    new_parser: Callable[[], AnswerParser]


async def prepare_chat(
    model: ServingModel,
    chat: ChatInput,
    options: GenerationOptions,
    limits: ServingLimits,
    *,
    request_id: str,
    fields: ChatFields = ChatFields(),  # noqa: B008 - a frozen value
) -> PreparedChat:
    """Check, render and tokenize; the grammar that tools ask for is set, the parser chosen.

    Args:
        options: `grammar` is the structured output asked for, if any.
        fields: what the API calls things, for complaints.

    Raises InvalidRequest naming the field, or ContextTooLong.
    """
    check_options(options, limits.vocab_size)
    prompt = await chat_prompt(model, chat, limits, fields)
    prepared = prepare(request_id, prompt.ids, options, model.defaults, limits, prompt_field=fields.messages)
    return PreparedChat(prepared, PlainParser)
