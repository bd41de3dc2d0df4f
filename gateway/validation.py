"""Checks options and completes them: one function from what a caller said to what a worker gets, for every edge.

Each complaint is an InvalidRequest that names the field. Limits are documented in this file only.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from common.errors import ContextTooLong, InvalidRequest
from common.sampling import SamplingParams
from gateway.completion import TextOptions
from gateway.generation import GenerationRequest, ServingLimits
from gateway.options import GenerationOptions
from gateway.serving import GenerationDefaults

T = TypeVar("T")

#: Inclusive limits by field; both ends must be finite numbers for the check to mean anything.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, 128),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "priority": (-(2**31), 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "timeout": (0.001, 86_400.0),
}
MAX_BIAS = 100.0
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_SALT_CHARACTERS = 256
#: Choices of one HTTP request, over all its prompts.
MAX_CHOICES = 1024
#: Below this a temperature means greedy; dividing by less would overflow.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request: what the dispatcher gets, and what the text layer does with the answer."""

    generation: GenerationRequest
    text: TextOptions


def prepare(
    request_id: str,
    prompt_ids: Sequence[int],
    options: GenerationOptions,
    defaults: GenerationDefaults,
    limits: ServingLimits,
    *,
    prompt_field: str,
    max_tokens_field: str = "max_tokens",
    allow_empty: bool = False,
) -> PreparedRequest:
    """Check and complete one request.

    Args:
        prompt_field: how this edge calls the prompt (`prompt`, `messages`, `token_ids`), for complaints.
        max_tokens_field: how the client called `max_tokens` (`max_completion_tokens`, `max_output_tokens`).
        allow_empty: `max_tokens` may be 0 (an echo of the prompt is all that is wanted). If its log probabilities are
            wanted too, one token is drawn all the same, and dropped.

    Raises InvalidRequest naming the field, or ContextTooLong.
    """
    check_options(options, limits.vocab_size)
    check_prompt(prompt_ids, limits, field=prompt_field)
    room = limits.max_request_tokens - len(prompt_ids)
    max_tokens = _max_tokens(options, room, least=0 if allow_empty else 1, field=max_tokens_field)
    drop_output = max_tokens == 0 and options.prompt_logprobs is not None
    params = _sampling(options, defaults, max_tokens, limits)
    if drop_output:
        params = replace(params, max_tokens=1)
    generation = GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        params=params,
        num_choices=options.n or 1,
        request_class=options.request_class,
        priority=options.priority or 0,
        cache_salt=options.cache_salt or "",
        timeout=options.timeout,
    )
    return PreparedRequest(generation, _text_options(options, params, drop_output=drop_output))


def check_options(options: GenerationOptions, vocab_size: int) -> None:
    """Everything that can be judged without the prompt. Raises InvalidRequest."""
    for name, (low, high) in RANGES.items():
        _check_range(name, getattr(options, name), low, high)
    _check_stops(options.stop)
    _check_bias(options, vocab_size)
    if len(options.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS} ids", field="stop_token_ids")
    _check_ids(options.stop_token_ids, vocab_size, field="stop_token_ids")
    if options.cache_salt is not None and not 1 <= len(options.cache_salt) <= MAX_SALT_CHARACTERS:
        raise InvalidRequest(f"cache_salt must have 1 to {MAX_SALT_CHARACTERS} characters", field="cache_salt")


def check_prompt(prompt_ids: Sequence[int], limits: ServingLimits, *, field: str) -> None:
    """A prompt has at least one token, only known ids, and leaves room for one more. Raises InvalidRequest."""
    if not prompt_ids:
        raise InvalidRequest(f"{field}: the prompt has no tokens", field=field)
    if len(prompt_ids) >= limits.max_request_tokens:
        raise ContextTooLong(
            f"the prompt has {len(prompt_ids)} tokens; at most {limits.max_request_tokens} fit, output included",
            field=field,
        )
    _check_ids(prompt_ids, limits.vocab_size, field=field)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if not (isinstance(value, int) or math.isfinite(value)) or not low <= value <= high:
        kind = "an integer" if isinstance(low, int) else "a number"
        raise InvalidRequest(f"{name} must be {kind} from {low} to {high}", field=name)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} strings", field="stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise InvalidRequest(f"stop: each string must have 1 to {MAX_STOP_CHARACTERS} characters", field="stop")


def _check_bias(options: GenerationOptions, vocab_size: int) -> None:
    for token_id, bias in options.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"logit_bias: token ids go from 0 to {vocab_size - 1}", field="logit_bias")
        if not (math.isfinite(bias) and -MAX_BIAS <= bias <= MAX_BIAS):
            raise InvalidRequest(f"logit_bias: values go from -{MAX_BIAS:g} to {MAX_BIAS:g}", field="logit_bias")


def _check_ids(ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidRequest(f"{field}: token ids go from 0 to {vocab_size - 1}", field=field)


def _sampling(
    options: GenerationOptions, defaults: GenerationDefaults, max_tokens: int, limits: ServingLimits
) -> SamplingParams:
    """Checked options with every default applied."""
    temperature = _first(options.temperature, defaults.temperature)
    top_p = _first(options.top_p, defaults.top_p)
    if temperature < GREEDY_TEMPERATURE or top_p == 0:
        temperature, top_p = 0.0, 1.0
    return SamplingParams(
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=min(max(_first(options.top_k, defaults.top_k), 0), limits.vocab_size),
        min_p=float(_first(options.min_p, defaults.min_p)),
        seed=_seed(options.seed),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(options, max_tokens),
        stop_token_ids=options.stop_token_ids,
        ignore_eos=bool(options.ignore_eos),
        logprobs=options.logprobs,
        presence_penalty=float(options.presence_penalty or 0),
        frequency_penalty=float(options.frequency_penalty or 0),
        repetition_penalty=float(_first(options.repetition_penalty, defaults.repetition_penalty)),
        logit_bias=dict(options.logit_bias),
        grammar=options.grammar,
        prompt_logprobs=options.prompt_logprobs,
    )


def _first(value: T | None, default: T) -> T:
    return default if value is None else value


def _max_tokens(options: GenerationOptions, room: int, *, least: int, field: str) -> int:
    """`room` tokens fit behind the prompt; unset means all of them."""
    if options.max_tokens is None:
        return room
    if options.max_tokens < least:
        raise InvalidRequest(f"{field} must be at least {least}", field=field)
    if options.max_tokens > room:
        raise ContextTooLong(
            f"{field} is {options.max_tokens}, but only {room} tokens fit behind the prompt", field=field
        )
    return options.max_tokens


def _min_tokens(options: GenerationOptions, max_tokens: int) -> int:
    min_tokens = options.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is above max_tokens ({max_tokens})", field="min_tokens")
    return min_tokens


def _seed(seed: int | None) -> int:
    """Unsigned 64 bits; a negative seed keeps its bit pattern."""
    return secrets.randbits(64) if seed is None else seed % 2**64


def _text_options(options: GenerationOptions, params: SamplingParams, *, drop_output: bool) -> TextOptions:
    return TextOptions(
        stop=options.stop,
        min_tokens=params.min_tokens,
        include_stop=bool(options.include_stop_str_in_output),
        skip_special_tokens=options.skip_special_tokens is not False,
        drop_output=drop_output,
        stop_token_ids=frozenset(params.stop_token_ids),
    )
