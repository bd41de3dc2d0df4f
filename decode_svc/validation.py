"""What a decode worker refuses at once: what it could never serve, or what would break its engine."""

import math
from dataclasses import dataclass

from common.errors import ContextTooLong, InvalidRequest
from decode_svc.request import DecodeRequest

#: Larger penalties and biases could drive logits to infinity; smaller repetition penalties too, as divisors.
MAX_ADJUSTMENT = 1e4
#: A year; beyond some centuries a thread cannot wait.
MAX_TIMEOUT = 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Of this worker and its model."""

    #: Longest prompt plus output in tokens.
    max_request_tokens: int
    vocab_size: int
    max_choices: int = 128
    max_logprobs: int = 100


def check_request(request: DecodeRequest, limits: RequestLimits) -> None:
    """Raise InvalidRequest naming the field that makes `request` impossible."""
    _check_tokens(request, limits)
    _check_sampling(request, limits)
    _check_choices(request, limits)
    if request.timeout is not None and not request.timeout <= MAX_TIMEOUT:
        raise InvalidRequest(f"timeout_seconds {request.timeout!r} is out of range", field="timeout_seconds")


def _check_tokens(request: DecodeRequest, limits: RequestLimits) -> None:
    length = len(request.prompt_ids)
    if length == 0:
        raise InvalidRequest("the prompt has no tokens", field="prompt_ids")
    if max(request.prompt_ids) >= limits.vocab_size:
        raise InvalidRequest(
            f"token id {max(request.prompt_ids)} is outside the vocabulary of {limits.vocab_size}", field="prompt_ids"
        )
    if length >= limits.max_request_tokens:
        raise ContextTooLong(
            f"a prompt of {length} tokens leaves no room for an answer: this worker holds "
            f"{limits.max_request_tokens} tokens of prompt and answer together",
            field="prompt_ids",
        )


def _check_choices(request: DecodeRequest, limits: RequestLimits) -> None:
    if not 1 <= len(request.choices) <= limits.max_choices:
        raise InvalidRequest(f"{len(request.choices)} choices; 1 to {limits.max_choices} are possible", field="choices")
    if all(choice.finished for choice in request.choices):
        raise InvalidRequest("every choice has ended already", field="choices")
    for choice in request.choices:
        count = len(choice.output_ids)
        too_long = count >= request.params.max_tokens or len(request.prompt_ids) + count >= limits.max_request_tokens
        if too_long and not choice.finished:
            raise InvalidRequest(f"{count} output tokens given, and no more may follow", field="choices")
        if count and max(choice.output_ids) >= limits.vocab_size:
            raise InvalidRequest("an output token is outside the vocabulary", field="choices")


def _check_sampling(request: DecodeRequest, limits: RequestLimits) -> None:
    params = request.params
    ranges = (
        ("temperature", 0.0 <= params.temperature < math.inf),
        ("top_p", 0.0 < params.top_p <= 1.0),
        ("min_p", 0.0 <= params.min_p <= 1.0),
        ("repetition_penalty", 1.0 / MAX_ADJUSTMENT <= params.repetition_penalty <= MAX_ADJUSTMENT),
        ("presence_penalty", abs(params.presence_penalty) <= MAX_ADJUSTMENT),
        ("frequency_penalty", abs(params.frequency_penalty) <= MAX_ADJUSTMENT),
        ("max_tokens", params.max_tokens >= 1),
        ("min_tokens", params.min_tokens <= params.max_tokens),
        ("logprobs", params.logprobs is None or params.logprobs <= limits.max_logprobs),
        ("logit_bias", all(token < limits.vocab_size for token in params.logit_bias)),
        ("logit_bias", all(abs(bias) <= MAX_ADJUSTMENT for bias in params.logit_bias.values())),
        ("stop_token_ids", all(token < limits.vocab_size for token in params.stop_token_ids)),
        # They are masked until min_tokens are out, and something must be left to draw then.
        ("stop_token_ids", len(set(params.stop_token_ids)) <= limits.vocab_size // 2),
    )
    for name, fine in ranges:
        if not fine:
            raise InvalidRequest(f"{name} {getattr(params, name)!r} is out of range", field=name)
