"""Long-lived background tasks: none of them may end unnoticed."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

_log = logging.getLogger(__name__)

_REPEAT_SECONDS = 0.1


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task; if it fails, its traceback is logged at once, not when somebody awaits it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("background task %s failed", task.get_name(), exc_info=error)


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for them. Their own failures were reported by `spawn`.

    A cancellation can get lost (asyncio.wait_for and redis-py swallow one that comes in the moment of success), so it
    is repeated for who does not listen.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_REPEAT_SECONDS)
