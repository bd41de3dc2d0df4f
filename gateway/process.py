"""How a gateway's process hears signals and serves HTTP: uvicorn without its own ideas of either."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import uvicorn


async def wait_for(event: asyncio.Event) -> None:
    await event.wait()


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: draining is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def shutdown_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events for the first and the second SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield first, second
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
