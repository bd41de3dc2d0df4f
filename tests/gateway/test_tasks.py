"""Background tasks: none ends unnoticed, and the end of an essential one is told, however it came."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from gateway.tasks import Fatal, TaskDied, end, spawn


async def fails() -> None:
    raise ValueError("boom")


async def returns() -> None:
    return None


async def cancels_itself() -> None:
    # As when something it awaits was cancelled by somebody else.
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("work", "how"), [(fails, "failed"), (returns, "returned"), (cancels_itself, "was cancelled from inside")]
)
async def test_every_end_of_an_essential_task_is_told(work: Callable[[], Awaitable[None]], how: str) -> None:
    fatal = Fatal()
    spawn(work(), "vital", fatal.report)  # type: ignore[arg-type]
    await asyncio.wait_for(fatal.happened.wait(), 10)
    with pytest.raises(TaskDied, match=f"background task 'vital' {how}") as died:
        fatal.raise_if_any()
    assert isinstance(died.value.__cause__, ValueError if work is fails else type(None))


async def test_an_end_that_was_asked_for_is_no_death() -> None:
    async def sleeps() -> None:
        await asyncio.Event().wait()

    fatal = Fatal()
    begun, fresh = spawn(sleeps(), "begun", fatal.report), None
    await asyncio.sleep(0)
    fresh = spawn(sleeps(), "fresh", fatal.report)
    await end([begun, fresh])
    assert not fatal.happened.is_set()
    fatal.raise_if_any()


async def test_the_first_death_counts_and_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    fatal = Fatal()
    for name in ("first", "second"):
        task = spawn(fails(), name, fatal.report)
        await asyncio.wait([task])
    with pytest.raises(TaskDied, match="first"):
        fatal.raise_if_any()
    assert [record.message for record in caplog.records] == [
        "background task first failed",
        "background task second failed",
    ]
