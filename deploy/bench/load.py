"""When requests are sent: so many at once (closed loop), at random times of a rate, or at the times of a trace."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random

from deploy.bench.client import Outcome
from deploy.bench.workload import Shape

#: Sends request number `index` and returns what became of it.
Send = Callable[[int, Shape], Awaitable[Outcome]]
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


async def closed_loop(
    send: Send, shapes: Sequence[Shape], concurrency: int, stop_at: float, clock: Clock
) -> list[Outcome]:
    """`concurrency` streams, each sending the next request when its last one has ended, until `stop_at` (clock)."""
    waiting = iter(enumerate(shapes))
    outcomes: list[Outcome] = []

    async def stream() -> None:
        for index, shape in waiting:
            if clock() >= stop_at:
                return
            outcomes.append(await send(index, shape))

    async with asyncio.TaskGroup() as streams:
        for _ in range(min(concurrency, len(shapes))):
            streams.create_task(stream())
    return outcomes


async def open_loop(
    send: Send, shapes: Sequence[Shape], times: Sequence[float], clock: Clock, sleep: Sleep = asyncio.sleep
) -> list[Outcome]:
    """Each request at its time (seconds from now, rising), however many others are still running."""
    begun = clock()
    sent: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as requests:
        for index, (shape, time) in enumerate(zip(shapes, times, strict=True)):
            await sleep(max(0.0, begun + time - clock()))
            sent.append(requests.create_task(_outcome(send, index, shape)))
    return [task.result() for task in sent]


async def _outcome(send: Send, index: int, shape: Shape) -> Outcome:
    return await send(index, shape)


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """`count` arrival times of a Poisson process of `rate` requests a second; the first is at 0."""
    return list(_poisson(count, rate, Random(f"{seed} arrivals")))


def _poisson(count: int, rate: float, random: Random) -> Iterator[float]:
    now = 0.0
    for _ in range(count):
        yield now
        now += random.expovariate(rate)


def trace_times(shapes: Sequence[Shape], speed_up: float) -> list[float]:
    """The trace's own times, `speed_up` times as fast."""
    return [(shape.at or 0.0) / speed_up for shape in shapes]
