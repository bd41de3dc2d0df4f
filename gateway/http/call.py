"""What chat and completion bodies have in common, as values: options, stream mode, and the prepared call."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest
from gateway.generation import RequestClass
from gateway.http.formats import AnswerFormat, StreamMode
from gateway.http.schemas import GenerationBody
from gateway.options import GenerationOptions
from gateway.validation import PreparedRequest

_TOKEN_KEY = re.compile(r"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Call:
    """A request ready to be answered: one prepared request for each prompt."""

    prepared: Sequence[PreparedRequest]
    format_: AnswerFormat
    mode: StreamMode


def options_of(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
    """All but the grammar, which takes time to check."""
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
        priority=body.priority,
        prompt_logprobs=body.prompt_logprobs,
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


def stream_mode(body: GenerationBody) -> StreamMode:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
    return StreamMode(
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )
