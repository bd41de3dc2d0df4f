"""Work whose time grows with its input: short inputs at once, long ones in a thread, so that other streams go on."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Characters, or token ids, that are worked on at once: about what a thread's start is worth.
_INLINE = 4096
#: A size for what is not worth measuring.
LONG = _INLINE + 1


async def off_loop(work: Callable[[], T], size: int) -> T:
    """The result of `work`, which takes time in proportion to `size`."""
    return work() if size <= _INLINE else await asyncio.to_thread(work)
