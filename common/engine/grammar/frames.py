"""How a worker and its compile process talk: frames of a tag, a job's number and a payload over pipes."""

import os
import struct
from enum import IntEnum
from typing import BinaryIO, NamedTuple

#: Tag, job, payload's length.
_HEAD = struct.Struct(">BII")
_READ_BYTES = 1 << 20


class Tag(IntEnum):
    """What a frame is."""

    #: To the process, once: limits as JSON, then the vocabulary as bytes.
    LIMITS = 1
    VOCABULARY = 2
    #: To the process: kind and source of a grammar, as JSON. Answered by one of the last three, unless it is cancelled.
    COMPILE = 3
    #: To the process: nobody wants this job any more. Its answer may be on its way already.
    CANCEL = 4
    #: From the process, once: it takes grammars from now on.
    READY = 5
    #: A serialized grammar.
    COMPILED = 6
    #: In words, what is wrong with the source.
    REFUSED = 7
    #: In words, what there was too little of to finish it; another time there may be enough.
    STARVED = 8


class Frame(NamedTuple):
    tag: Tag
    #: 0 where it is about none.
    job: int = 0
    payload: bytes = b""


def write_frame(stream: BinaryIO, frame: Frame) -> None:
    """Raises OSError if nobody reads any more."""
    stream.write(_HEAD.pack(frame.tag, frame.job, len(frame.payload)) + frame.payload)
    stream.flush()


class FrameReader:
    """Takes frames out of a pipe as its bytes come, so that one reader may wait for several pipes."""

    def __init__(self, descriptor: int) -> None:
        """The pipe stays the caller's to close."""
        self._descriptor = descriptor
        self._bytes = bytearray()

    def read(self) -> list[Frame] | None:
        """The frames that are whole after one more read, perhaps none; None at the end, wherever in a frame that is.

        Waits only while the pipe is empty.
        """
        part = os.read(self._descriptor, _READ_BYTES)
        if not part:
            return None
        self._bytes += part
        return list(iter(self._take, None))

    def _take(self) -> Frame | None:
        if len(self._bytes) < _HEAD.size:
            return None
        tag, job, length = _HEAD.unpack_from(self._bytes)
        end = _HEAD.size + length
        if len(self._bytes) < end:
            return None
        payload = bytes(memoryview(self._bytes)[_HEAD.size : end])
        del self._bytes[:end]
        return Frame(Tag(tag), job, payload)
