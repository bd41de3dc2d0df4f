"""Background tasks that a process cannot do without."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def spawn_essential(
    work: Coroutine[Any, Any, None], name: str, fail: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """Run `work` beside everything else; an error in it is passed to `fail`, which brings the process down."""
    task = asyncio.create_task(work, name=name)

    def done(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            fail(error)

    task.add_done_callback(done)
    return task


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel `task` and wait for its end. What made it fail, if it did, has been reported already."""
    while not task.done():
        # Again and again: a library may swallow a cancellation (redis-py does, while it reconnects).
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
