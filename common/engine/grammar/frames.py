"""How a worker and its compile process talk: frames of a tag and a payload over pipes."""

import struct
from enum import IntEnum
from typing import BinaryIO

#: Tag, payload's length.
_HEAD = struct.Struct(">BI")


class Tag(IntEnum):
    """What a frame is."""

    #: To the process, once: limits as JSON, then the vocabulary as bytes.
    LIMITS = 1
    VOCABULARY = 2
    #: To the process: kind and source of a grammar, as JSON. Each is answered by one of the last three.
    COMPILE = 3
    #: From the process, once: it takes grammars from now on.
    READY = 4
    #: A serialized grammar.
    COMPILED = 5
    #: In words, what is wrong with the source.
    REFUSED = 6
    #: It got too little of the machine to finish; another time it may.
    STARVED = 7


def write_frame(stream: BinaryIO, tag: Tag, payload: bytes) -> None:
    """Raises OSError if nobody reads any more."""
    stream.write(_HEAD.pack(tag, len(payload)) + payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[Tag, bytes] | None:
    """The next frame; None at the stream's end, wherever in a frame that is."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    tag, length = _HEAD.unpack(head)
    payload = stream.read(length)
    return None if len(payload) < length else (Tag(tag), payload)
