"""Server-sent events, and what writes the answer of one API. Knows no sockets."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

from gateway.answer import Answer
from gateway.completion import ChoiceDelta
from gateway.http.formats import Json
from gateway.http.json_body import gathered, json_pieces


class AnswerWriter(Protocol):
    """One answer in the words of one API, as an event stream or in one piece. One object per request.

    Events come as bytes that are made when they are taken, in pieces of bounded work: others get their turn between.
    """

    def begin(self) -> Iterator[bytes]:
        """Events in front of the first delta; the workers have accepted the request."""
        ...

    def delta(self, index: int, delta: ChoiceDelta, answer: Answer) -> Iterator[bytes]:
        """Events of one delta of a choice; none if it holds nothing that the client asked for."""
        ...

    async def end(self, answer: Answer) -> Iterator[bytes]:
        """The last events, after all deltas."""
        ...

    async def failure(self, error: Exception) -> Iterator[bytes]:
        """The last events of a stream that had begun and cannot go on."""
        ...

    async def whole(self, answer: Answer) -> Sequence[bytes]:
        """Reads the answer to its end and gives it as JSON, in pieces. Raises what the answer raises."""
        ...


def event(body: Json, *, name: str | None = None) -> bytes:
    """One event: a line with its name, if it has one, and one of JSON."""
    data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{_head(name)}{data}\n\n".encode()


def event_pieces(body: Json, *, name: str | None = None) -> Iterator[bytes]:
    """As `event`, for one that may be long or hold a `JsonList`."""
    return gathered(chain((_head(name).encode(),), json_pieces(body), (b"\n\n",)))


def _head(name: str | None) -> str:
    return "data: " if name is None else f"event: {name}\ndata: "
