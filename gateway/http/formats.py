"""What the two OpenAI formats have in common: envelope, usage, and the shape that the responder works with."""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.sampling import FinishReason, TokenLogprobs
from gateway.completion import ChoiceDelta, TextToken, Usage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamMode:
    """How the client wants its answer."""

    stream: bool = False
    #: One more chunk with the usage at the end.
    include_usage: bool = False
    #: The usage so far in every chunk.
    continuous_usage: bool = False


@dataclass(slots=True)
class WholeChoice:
    """A choice collected for an answer in one piece."""

    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    #: If asked for: those of the prompt's tokens from the second on.
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.stop_reason = delta.stop_reason

    @property
    def num_scores(self) -> int:
        """Log probabilities in it: what most of the work on a long answer is spent on."""
        rows = [token.logprobs for token in self.tokens if token.logprobs is not None]
        return sum(len(row) * (1 + len(row[0].top)) for row in (rows, self.prompt_logprobs) if row)


class AnswerFormat(Protocol):
    """Turns deltas into the JSON of one API. One object per request."""

    def chunks(self, index: int, delta: ChoiceDelta) -> Iterable[Json]:
        """Stream chunks of one delta, in order; none if it holds nothing that the client asked for."""
        ...

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk without choices that ends a stream if the client asked for it."""
        ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        """The answer in one piece."""
        ...


class Envelope:
    """The fields that all chunks of an answer share."""

    def __init__(self, prefix: str, object_: str, model: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._object = object_
        self._model = model
        self._created = int(time.time())

    def wrap(self, choices: Sequence[Json], usage: Usage | None = None) -> Json:
        body: Json = {
            "id": self.id,
            "object": self._object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return body if usage is None else body | {"usage": usage_json(usage)}


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def finish_json(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
