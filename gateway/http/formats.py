"""What the two OpenAI formats have in common: envelope, usage, and the shape that the responder works with."""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.sampling import FinishReason
from gateway.completion import ChoiceDelta, Usage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamMode:
    """How the client wants its answer."""

    stream: bool = False
    #: One more chunk with the usage at the end.
    include_usage: bool = False
    #: The usage so far in every chunk.
    continuous_usage: bool = False


class AnswerFormat(Protocol):
    """Turns deltas into the JSON of one API. One object per request."""

    def chunks(self, index: int, delta: ChoiceDelta) -> Iterator[Json]:
        """Stream chunks of one delta, in order, each made when it is taken; none if the delta holds nothing that the
        client asked for."""
        ...

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk without choices that ends a stream if the client asked for it."""
        ...

    async def collect(self, index: int, delta: ChoiceDelta) -> None:
        """Take in a delta of an answer in one piece; what can be written of it is written now."""
        ...

    def whole(self, usage: Usage) -> Json:
        """The answer in one piece, of all deltas that were collected; long lists are `JsonList`s."""
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
