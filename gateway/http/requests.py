"""From an OpenAI body to prepared requests and the format of their answer. Knows no sockets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from common.errors import InvalidRequest
from gateway.conversation import Turn
from gateway.generation import RequestClass, ServingLimits
from gateway.http.chat_format import ChatFormat
from gateway.http.completion_format import CompletionFormat
from gateway.http.formats import AnswerFormat, StreamMode
from gateway.http.refused import refuse_unsupported
from gateway.http.schemas import ChatCompletionBody, ChatMessage, CompletionBody, GenerationBody
from gateway.options import GenerationOptions
from gateway.prompts import chat_ids, text_ids
from gateway.serving import ServingModel
from gateway.validation import MAX_CHOICES, RANGES, PreparedRequest, check_options, check_prompt, prepare

_TOKEN_KEY = re.compile(r"-?[0-9]{1,19}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A request ready to be answered: one prepared request for each prompt."""

    prepared: Sequence[PreparedRequest]
    format_: AnswerFormat
    mode: StreamMode


async def chat_call(body: ChatCompletionBody, model: ServingModel, limits: ServingLimits) -> Call:
    """Raises NotFound (model) or InvalidRequest naming the field."""
    name = model.check_name(body.model)
    refuse_unsupported(body.model_extra)
    options = _options(body, max_tokens=_first(body.max_completion_tokens, body.max_tokens), logprobs=_chat_top(body))
    check_options(options, limits.vocab_size)
    mode = _mode(body)
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


async def completion_call(body: CompletionBody, model: ServingModel, limits: ServingLimits) -> Call:
    """Raises NotFound (model) or InvalidRequest naming the field."""
    name = model.check_name(body.model)
    _refuse_completion_fields(body)
    options = _options(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    check_options(options, limits.vocab_size)
    mode = _mode(body)
    prompts = _prompts(body)
    num_choices = options.n or 1
    if len(prompts) * num_choices > MAX_CHOICES:
        raise InvalidRequest(f"prompt: at most {MAX_CHOICES} choices over all prompts", field="prompt")
    prompt_ids = [await _prompt_ids(prompt, model, limits) for prompt in prompts]
    format_ = CompletionFormat(
        name,
        model.tokenizer,
        logprobs=options.logprobs is not None,
        choices_per_prompt=num_choices,
        echoes=_echoes(body, model, prompts),
    )
    prepared = [
        prepare(
            f"{format_.id}-{index}",
            ids,
            options,
            model.defaults,
            limits,
            prompt_field="prompt",
            allow_empty=bool(body.echo),
        )
        for index, ids in enumerate(prompt_ids)
    ]
    return Call(prepared, format_, mode)


async def _prompt_ids(prompt: str | list[int], model: ServingModel, limits: ServingLimits) -> list[int]:
    if isinstance(prompt, str):
        return await text_ids(model, prompt, limits, field="prompt")
    check_prompt(prompt, limits, field="prompt")
    return prompt


def _options(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
    return GenerationOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        n=body.n,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_bias(body.logit_bias or {}),
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        cache_salt=body.cache_salt,
        request_class=_request_class(body.service_tier),
    )


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON object keys are strings; these must spell token ids."""
    for key in bias:
        if not _TOKEN_KEY.fullmatch(key):
            raise InvalidRequest("logit_bias: keys must be token ids", field="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _request_class(service_tier: str | None) -> RequestClass:
    """OpenAI's `flex` tier trades latency for price: the batch class. All other tiers are interactive."""
    return RequestClass.BATCH if service_tier == "flex" else RequestClass.INTERACTIVE


def _mode(body: GenerationBody) -> StreamMode:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
    return StreamMode(
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )


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


def _refuse_completion_fields(body: CompletionBody) -> None:
    refuse_unsupported(body.model_extra)
    if body.suffix:
        raise InvalidRequest("suffix is not supported", field="suffix", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != _first(body.n, 1):
        raise InvalidRequest("best_of is not supported beside n", field="best_of", code="unsupported_parameter")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported", field="echo", code="unsupported_parameter")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [entry for entry in prompt if isinstance(entry, str | list)]


def _echoes(body: CompletionBody, model: ServingModel, prompts: Sequence[str | list[int]]) -> list[str]:
    """Texts as the client gave them; token ids as text, special tokens included."""
    if not body.echo:
        return [""] * len(prompts)
    decode = model.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=False) for prompt in prompts]


def _first(value: T | None, default: T) -> T:
    return default if value is None else value
