"""Server-sent events, and what writes the answer of one API. Knows no sockets."""

import json
from typing import Protocol

from gateway.answer import Answer
from gateway.completion import ChoiceDelta
from gateway.http.formats import Json


class AnswerWriter(Protocol):
    """One answer in the words of one API, as an event stream or in one piece. One object per request."""

    def begin(self) -> bytes:
        """Events in front of the first delta; the workers have accepted the request."""
        ...

    def delta(self, index: int, delta: ChoiceDelta, answer: Answer) -> bytes:
        """Events of one delta of a choice; none if it holds nothing that the client asked for."""
        ...

    async def end(self, answer: Answer) -> bytes:
        """The last events, after all deltas."""
        ...

    async def failure(self, error: Exception) -> bytes:
        """The last events of a stream that had begun and cannot go on."""
        ...

    async def whole(self, answer: Answer) -> bytes:
        """Reads the answer to its end and gives it in one piece, as JSON. Raises what the answer raises."""
        ...


def event(body: Json, *, name: str | None = None) -> bytes:
    """One event: a line with its name, if it has one, and one of JSON."""
    data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode()
