"""Writes answers of chat and completions: a stream of chunks that `[DONE]` ends, or all choices at once."""

from collections.abc import Iterator, Sequence

from gateway.answer import Answer
from gateway.completion import ChoiceDelta
from gateway.http.errors import error_body
from gateway.http.events import event
from gateway.http.formats import AnswerFormat, Json, StreamMode, usage_json
from gateway.http.json_body import json_paced

_DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """`AnswerWriter` over the format of one of the two APIs."""

    def __init__(self, format_: AnswerFormat, mode: StreamMode) -> None:
        self._format = format_
        self._mode = mode

    def begin(self) -> Iterator[bytes]:
        return iter(())

    def delta(self, index: int, delta: ChoiceDelta, answer: Answer) -> Iterator[bytes]:
        return (self._event(chunk, answer) for chunk in self._format.chunks(index, delta))

    def _event(self, chunk: Json, answer: Answer) -> bytes:
        if self._mode.continuous_usage:
            chunk |= {"usage": usage_json(answer.usage)}
        return event(chunk)

    async def end(self, answer: Answer) -> Iterator[bytes]:
        usage = event(self._format.usage_chunk(answer.usage)) if self._mode.include_usage else b""
        return iter((usage + _DONE,))

    async def failure(self, error: Exception) -> Iterator[bytes]:
        """No `[DONE]` follows: the answer is not complete."""
        return iter((event(error_body(error)),))

    async def whole(self, answer: Answer) -> Sequence[bytes]:
        async for index, delta in answer:
            await self._format.collect(index, delta)
        return await json_paced(self._format.whole(answer.usage))
