"""Reads an OpenAI event stream: bytes in, JSON events out. Used by the chat and by the benchmark."""

import json
from typing import Any

DONE = b"[DONE]"


class EventParser:
    """Collects bytes as they come and gives back the events that are whole.

    Only what OpenAI's streams use of the format: `data:` lines, ended by an empty line; comments are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        #: `[DONE]` was seen.
        self.done = False

    def feed(self, chunk: bytes) -> list[Any]:
        """The JSON of each event completed by `chunk`.

        Raises:
            ValueError: an event that is not JSON.
        """
        *blocks, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        payloads = [payload for block in blocks if (payload := _data(block))]
        if DONE in payloads:
            self.done = True
            payloads.remove(DONE)
        return [json.loads(payload) for payload in payloads]


def _data(block: bytes) -> bytes:
    lines = (line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)
