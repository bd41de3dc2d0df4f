"""Long work on the event loop, in parts: between two of them everything else that waits gets its turn.

A thread would not do: building and writing an answer's objects holds the interpreter for itself, wherever it runs.
"""

import asyncio

#: Tokens and log probabilities, counted together, that are worked on at a time: a few milliseconds.
PART = 1024
#: Bytes that are put together or sent at a time: a few milliseconds where they are of many small things.
PART_BYTES = 64 * 1024


class Pace:
    """Counts work; `turn` lets the loop run once there has been enough of it."""

    def __init__(self, most: int) -> None:
        """`most`: units of work between two turns."""
        self._most = most
        self._done = 0

    def count(self, units: int) -> None:
        self._done += units

    async def turn(self) -> None:
        if self._done >= self._most:
            self._done = 0
            await asyncio.sleep(0)


def rows_per_part(columns: int) -> int:
    """How many rows of so many log probabilities make a part."""
    return max(1, PART // max(1, columns))
