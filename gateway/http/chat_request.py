"""From a chat completion body to a prepared request and the format of its answer. Knows no sockets."""

from common.errors import InvalidRequest
from gateway.chat.request import Turn
from gateway.generation import ServingLimits
from gateway.http.call import Call, options_of, stream_mode
from gateway.http.chat_format import ChatFormat
from gateway.http.refused import refuse_unsupported
from gateway.http.schemas import ChatCompletionBody, ChatMessage
from gateway.prompts import chat_ids
from gateway.serving import ServingModel
from gateway.validation import RANGES, check_options, prepare


async def chat_call(body: ChatCompletionBody, model: ServingModel, limits: ServingLimits) -> Call:
    """Raises NotFound (model) or InvalidRequest naming the field."""
    name = model.check_name(body.model)
    refuse_unsupported(body.model_extra)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    options = options_of(body, max_tokens=max_tokens, logprobs=_chat_top(body))
    check_options(options, limits.vocab_size)
    mode = stream_mode(body)
    prompt_ids = await chat_ids(
        model,
        [_turn(index, message) for index, message in enumerate(body.messages)],
        limits,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
    )
    format_ = ChatFormat(name, model.tokenizer, stream=mode.stream, logprobs=options.logprobs is not None)
    request = prepare(format_.id, prompt_ids, options, model.defaults, limits, prompt_field="messages")
    return Call([request], format_, mode)


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


def _turn(index: int, message: ChatMessage) -> Turn:
    refuse_unsupported(message.model_extra, message=index)
    return Turn(message.role, _content(f"messages[{index}].content", message), message.name)


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
