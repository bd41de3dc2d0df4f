"""Between the messages of `inference.proto` and the gateway's own values. Judges nothing but what has no value."""

from collections.abc import Iterator, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.pb.tandem.v1 import generation_pb2, inference_pb2
from common.sampling import Candidate, FinishReason, TokenLogprobs
from common.text.tokenizer import Tokenizer
from gateway.completion import ChoiceDelta, TextToken, Usage
from gateway.generation import GenerationStats, RequestClass
from gateway.options import GenerationOptions
from gateway.pace import rows_per_part

_FINISH = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_OPTIONAL_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
    "priority",
)


def options_from_proto(message: inference_pb2.GenerationOptions, seconds_left: float | None) -> GenerationOptions:
    """All but the grammar; only the class is checked (InvalidRequest). `seconds_left` is the caller's deadline."""
    given = {name: getattr(message, name) for name in _OPTIONAL_FIELDS if message.HasField(name)}
    return GenerationOptions(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        cache_salt=message.cache_salt or None,
        request_class=_request_class(message.request_class),
        timeout=seconds_left,
    )


def _request_class(name: str) -> RequestClass:
    try:
        return RequestClass(name or RequestClass.INTERACTIVE.value)
    except ValueError as error:
        known = ", ".join(member.value for member in RequestClass)
        raise InvalidRequest(f"request_class must be one of {known}", field="request_class") from error


def delta_to_proto(tokenizer: Tokenizer, delta: ChoiceDelta) -> inference_pb2.TextDelta:
    return inference_pb2.TextDelta(
        choice=delta.choice,
        text=delta.text,
        finish_reason=_FINISH[delta.finish_reason],
        **tokens_to_proto(tokenizer, delta.tokens),
        **stop_reason_to_proto(delta.stop_reason),
    )


def stop_reason_to_proto(reason: str | int | None) -> dict[str, Any]:
    """The field of a TextDelta that says it; none if the caller's stops ended nothing."""
    match reason:
        case None:
            return {}
        case str():
            return {"stop_string": reason}
        case int():
            return {"stop_token_id": reason}


def tokens_to_proto(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> dict[str, Any]:
    """The fields of a TextDelta that are about tokens."""
    scores = [token.logprobs for token in tokens if token.logprobs is not None]
    return {
        "token_ids": [token.token_id for token in tokens],
        "logprobs": [_logprobs(tokenizer, score, len(score.top)) for score in scores],
    }


def prompt_to_proto(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprobs], count: int
) -> Iterator[inference_pb2.PromptScores]:
    """One message at least, each of bounded work and far below the 4 MiB that clients take unless they say otherwise.

    Args:
        count: how many of the most likely ones to show; `scores` may hold more.
    """
    each = rows_per_part(count + 1)
    for start in range(0, max(len(scores), 1), each):
        part = scores[start : start + each]
        yield inference_pb2.PromptScores(logprobs=[_logprobs(tokenizer, score, count) for score in part])


def _logprobs(tokenizer: Tokenizer, score: TokenLogprobs, count: int) -> inference_pb2.TextLogprobs:
    return inference_pb2.TextLogprobs(
        chosen=_candidate(tokenizer, score.chosen),
        top=[_candidate(tokenizer, candidate) for candidate in score.top[:count]],
    )


def _candidate(tokenizer: Tokenizer, candidate: Candidate) -> inference_pb2.TextCandidate:
    return inference_pb2.TextCandidate(
        token_id=candidate.token_id,
        text=tokenizer.token_text(candidate.token_id),
        bytes=tokenizer.token_bytes(candidate.token_id),
        logprob=candidate.logprob,
    )


def summary_to_proto(usage: Usage, stats: Sequence[GenerationStats]) -> inference_pb2.GenerationSummary:
    """Usage as the client is charged; `stats` holds the workers' own figures, by the names of RequestStats."""
    summary = inference_pb2.GenerationSummary(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
    known = generation_pb2.RequestStats.DESCRIPTOR.fields_by_name
    for figures in stats:
        for name, value in figures.details.items():
            if name in known:
                setattr(summary.stats, name, value)
    return summary
