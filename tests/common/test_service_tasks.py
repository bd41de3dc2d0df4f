"""Essential background tasks: what fails in one reaches the process; ending one is certain."""

import asyncio

from common.service.tasks import end_task, spawn_essential


async def test_an_error_reaches_the_process_once() -> None:
    failures: list[BaseException] = []

    async def work() -> None:
        raise ValueError("broken")

    task = spawn_essential(work(), "work", failures.append)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [str(failure) for failure in failures] == ["broken"]


async def test_an_end_and_a_cancellation_are_no_failures() -> None:
    failures: list[BaseException] = []

    async def short() -> None:
        pass

    async def endless() -> None:
        await asyncio.Event().wait()

    await asyncio.wait([spawn_essential(short(), "short", failures.append)])
    await end_task(spawn_essential(endless(), "endless", failures.append))
    assert failures == []


async def test_a_task_that_swallows_a_cancellation_ends_all_the_same() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.Event().wait()

    task = spawn_essential(stubborn(), "stubborn", lambda error: None)
    await asyncio.sleep(0)
    await end_task(task)
    assert task.done() and swallowed == 1
