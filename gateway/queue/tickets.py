"""One request of this gateway in the queue, and what has to be told to the backend about it. Values, no policy."""

import asyncio
import time
from dataclasses import dataclass

from gateway.queue.interface import Entry, QueueFigures

#: Bounds of the Retry-After that a full queue answers, in seconds.
_RETRY_AFTER = (1.0, 60.0)


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, waiting or admitted."""

    entry: Entry
    #: time.monotonic() of its arrival.
    since: float
    admitted: asyncio.Future[None]
    #: A backend has taken it: it may be asserted to another one whatever the bound.
    taken: bool = False

    @property
    def waited(self) -> float:
        """Seconds."""
        return time.monotonic() - self.since

    @property
    def granted(self) -> bool:
        return self.admitted.done() and not self.admitted.cancelled() and self.admitted.exception() is None

    def admit(self) -> None:
        if not self.admitted.done():
            self.admitted.set_result(None)

    def refuse(self, error: Exception) -> None:
        if not self.admitted.done():
            self.admitted.set_exception(error)


@dataclass(frozen=True, slots=True)
class Enqueue:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Remove:
    request_id: str


Operation = Enqueue | Remove


def retry_after(figures: QueueFigures, speed: float) -> float:
    """Seconds until what waits has been prefilled at `speed` tokens per second, within reason; 0: not measured."""
    seconds = figures.waiting_cost / speed if speed > 0 else 0.0
    return min(max(seconds, _RETRY_AFTER[0]), _RETRY_AFTER[1])
