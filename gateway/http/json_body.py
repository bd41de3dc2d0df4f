"""JSON as bytes, in pieces that each take little work: an answer may be tens of megabytes long. Knows no API."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gateway.pace import PART, PART_BYTES, Pace

#: Levels that are written value by value. Below them are a client's own objects, which the library writes at once.
_LEVELS = 10

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class JsonList:
    """A list that is written while it grows: what it keeps are bytes, not the objects that they were made of.

    An answer of so many log probabilities would else be half a million objects, all written at its end.
    """

    def __init__(self, items: Sequence[Any] = ()) -> None:
        #: Each one or more items, without the brackets.
        self._pieces: list[bytes] = []
        self.extend(items)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def extend(self, items: "Sequence[Any] | JsonList") -> None:
        """Items that JSON has; they are written at once, if they are not written yet."""
        if isinstance(items, JsonList):
            self._pieces += items._pieces
        elif items:
            self._pieces.append(_bare(items))

    def __add__(self, other: "JsonList") -> "JsonList":
        """Both, one after the other. What is written already is shared."""
        return self.joined((self, other))

    @classmethod
    def joined(cls, lists: "Iterable[JsonList]") -> "JsonList":
        """All of them, one after the other."""
        joined = cls()
        for written in lists:
            joined.extend(written)
        return joined

    def copy(self) -> "JsonList":
        """The list as it is now."""
        return self + JsonList()

    def pieces(self) -> Iterator[bytes]:
        yield b"["
        for index, piece in enumerate(self._pieces):
            yield b"," + piece if index else piece
        yield b"]"


def json_pieces(body: Any) -> Iterator[bytes]:
    """As `json.dumps` writes it, with `JsonList`s as lists, in pieces of about PART_BYTES."""
    return gathered(_written(body, _LEVELS))


async def json_paced(body: Any) -> list[bytes]:
    """All pieces; the event loop runs between them."""
    pace, pieces = Pace(PART_BYTES), []
    for piece in json_pieces(body):
        pieces.append(piece)
        pace.count(len(piece))
        await pace.turn()
    return pieces


async def json_bytes(body: Any) -> bytes:
    """As `json_paced`, in one piece."""
    return b"".join(await json_paced(body))


async def json_list(parts: Iterable[Sequence[Any]]) -> JsonList:
    """The items of all parts, each of which is made in one turn of the event loop."""
    written, pace = JsonList(), Pace(1)
    for part in parts:
        written.extend(part)
        pace.count(1)
        await pace.turn()
    return written


def gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Small pieces put together to some of about PART_BYTES; none that is empty."""
    some: list[bytes] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            yield b"".join(some)
            some, size = [], 0
    if size:
        yield b"".join(some)


def _written(value: Any, levels: int) -> Iterator[bytes]:
    if isinstance(value, JsonList):
        yield from value.pieces()
    elif levels and isinstance(value, dict):
        yield from _in_brackets(b"{}", (_member(key, item, levels - 1) for key, item in value.items()))
    elif levels and isinstance(value, list):
        yield from _in_brackets(b"[]", _items(value, levels - 1))
    else:
        yield _encode(value).encode()


def _in_brackets(brackets: bytes, items: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    yield brackets[:1]
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
    yield brackets[1:]


def _member(key: str, value: Any, levels: int) -> Iterator[bytes]:
    yield f"{_encode(key)}:".encode()
    yield from _written(value, levels)


def _items(values: list[Any], levels: int) -> Iterator[Iterator[bytes]]:
    """Plain values are written many at a time: it may be a hundred thousand numbers."""
    plain: list[Any] = []
    size = 0
    for value in values:
        nested = isinstance(value, dict | list | JsonList)
        if plain and (nested or len(plain) == PART or size >= PART_BYTES):
            yield iter((_bare(plain),))
            plain, size = [], 0
        if nested:
            yield _written(value, levels)
        else:
            plain.append(value)
            size += len(value) if isinstance(value, str) else 1
    if plain:
        yield iter((_bare(plain),))


def _bare(items: Sequence[Any]) -> bytes:
    """A list without its brackets."""
    return _encode(items)[1:-1].encode()
