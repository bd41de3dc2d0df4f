"""Counts the turns of the event loop: work that others can pass by leaves it some."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Turns:
    count: int = 0


@contextmanager
def counted_turns() -> Iterator[Turns]:
    """Those that the loop makes while the block runs."""
    turns = Turns()

    async def count() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    yield turns
    counting.cancel()
