"""Writes answers of chat and completions: a stream of chunks that `[DONE]` ends, or all choices at once."""

from gateway.answer import Answer
from gateway.completion import ChoiceDelta
from gateway.http.errors import error_body
from gateway.http.events import event
from gateway.http.formats import AnswerFormat, Json, StreamMode, WholeChoice, usage_json
from gateway.http.json_body import json_body
from gateway.off_loop import off_loop

_DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """`AnswerWriter` over the format of one of the two APIs."""

    def __init__(self, format_: AnswerFormat, mode: StreamMode) -> None:
        self._format = format_
        self._mode = mode

    def begin(self) -> bytes:
        return b""

    def delta(self, index: int, delta: ChoiceDelta, answer: Answer) -> bytes:
        return b"".join(self._event(chunk, answer) for chunk in self._format.chunks(index, delta))

    def _event(self, chunk: Json, answer: Answer) -> bytes:
        if self._mode.continuous_usage:
            chunk |= {"usage": usage_json(answer.usage)}
        return event(chunk)

    async def end(self, answer: Answer) -> bytes:
        if not self._mode.include_usage:
            return _DONE
        return event(self._format.usage_chunk(answer.usage)) + _DONE

    async def failure(self, error: Exception) -> bytes:
        """No `[DONE]` follows: the answer is not complete."""
        return event(error_body(error))

    async def whole(self, answer: Answer) -> bytes:
        choices = [WholeChoice() for _ in range(answer.num_choices)]
        async for index, delta in answer:
            choices[index].add(delta)
        return await off_loop(
            lambda: json_body(self._format.whole(choices, answer.usage)),
            sum(choice.num_scores for choice in choices),
        )
