"""Long-lived background tasks: none of them may end unnoticed."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

_log = logging.getLogger(__name__)

_REPEAT_SECONDS = 0.1

#: Told that an essential task has ended by itself, and why.
OnDeath = Callable[[BaseException], None]


class TaskDied(Exception):
    """An essential background task has ended by itself; its own error, if it had one, is the cause."""


class Fatal:
    """The first thing after which the gateway cannot go on. Whoever runs it waits for `happened` and raises `error`."""

    def __init__(self) -> None:
        self.happened = asyncio.Event()
        self.error: BaseException | None = None

    def report(self, error: BaseException) -> None:
        """An OnDeath: later ones are mostly consequences of the first."""
        self.error = self.error or error
        self.happened.set()

    def raise_if_any(self) -> None:
        if self.error is not None:
            raise self.error


def spawn(work: Coroutine[Any, Any, None], name: str, on_death: OnDeath | None = None) -> asyncio.Task[None]:
    """Start a task; if it fails, its traceback is logged at once, not when somebody awaits it.

    With `on_death` the task is essential: it has to run until `end` ends it. If it ends otherwise (by an error, by
    returning, by a cancellation that came from inside), `on_death` is called with a TaskDied.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    if on_death is not None:
        task.add_done_callback(lambda ended: _tell_death(ended, on_death))
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("background task %s failed", task.get_name(), exc_info=error)


def _tell_death(task: asyncio.Task[None], on_death: OnDeath) -> None:
    if task.cancelling():
        return
    how = "was cancelled from inside" if task.cancelled() else "failed" if task.exception() else "returned"
    died = TaskDied(f"background task {task.get_name()!r} {how}")
    died.__cause__ = None if task.cancelled() else task.exception()
    on_death(died)


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
