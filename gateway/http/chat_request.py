"""From a chat completion body to a prepared request and the format of its answer. Knows no sockets."""

from dataclasses import replace

from common.errors import InvalidRequest
from gateway.chat.answer import ChatAnswer
from gateway.chat.fields import ChatFields
from gateway.chat.prepare import prepare_chat
from gateway.generation import ServingLimits
from gateway.http.call import Call, options_of, stream_mode
from gateway.http.chat_format import ChatFormat, PromptScores
from gateway.http.chat_input import chat_input
from gateway.http.formats import Envelope
from gateway.http.prompt_logprobs import refuse_streamed
from gateway.http.refused import refuse_unsupported
from gateway.http.schemas import ChatCompletionBody
from gateway.http.structured_fields import checked_grammar
from gateway.serving import ServingModel
from gateway.validation import RANGES, check_options


async def chat_call(body: ChatCompletionBody, model: ServingModel, limits: ServingLimits) -> Call:
    """Raises NotFound (model) or InvalidRequest naming the field."""
    name = model.check_name(body.model)
    refuse_unsupported(body.model_extra)
    if body.echo:
        message = "echo is not supported for chats; the prompt's own words are in the request"
        raise InvalidRequest(message, field="echo", code="unsupported_parameter")
    refuse_streamed(body.prompt_logprobs, stream=body.stream)
    max_tokens, fields = body.max_tokens, ChatFields()
    if body.max_completion_tokens is not None:
        max_tokens, fields = body.max_completion_tokens, ChatFields(max_tokens="max_completion_tokens")
    options = options_of(body, max_tokens=max_tokens, logprobs=_chat_top(body))
    check_options(options, limits.vocab_size)
    mode = stream_mode(body)
    options = replace(options, grammar=await checked_grammar(body))
    envelope = Envelope("chatcmpl", "chat.completion.chunk" if mode.stream else "chat.completion", name)
    chat = await prepare_chat(
        model, chat_input(body, body.messages), options, limits, request_id=envelope.id, fields=fields
    )
    scores = None
    if options.prompt_logprobs is not None:
        scores = PromptScores(chat.prepared.generation.prompt_ids, options.prompt_logprobs)
    format_ = ChatFormat(
        envelope,
        model.tokenizer,
        ChatAnswer(chat.new_parser),
        logprobs=options.logprobs is not None,
        prompt_scores=scores,
    )
    return Call([chat.prepared], format_, mode)


def _chat_top(body: ChatCompletionBody) -> int | None:
    """`logprobs` switches them on, `top_logprobs` says how many alternatives."""
    low, high = RANGES["logprobs"]
    if body.top_logprobs is not None and not low <= body.top_logprobs <= high:
        raise InvalidRequest(f"top_logprobs must be a number from {low:g} to {high:g}", field="top_logprobs")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    return None
