"""The queue of this gateway alone: the shared policy in this process, for as long as Redis is away or not used."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.queue.fair import FairQueue
from gateway.queue.interface import Entry, QueueFigures, Reply, Status


class LocalBackend:
    """Backend without any input or output."""

    def __init__(self, *, capacity: Callable[[], int], max_waiting: int) -> None:
        """`capacity`: prompt tokens that may be admitted at once, asked at every operation."""
        self._queue = FairQueue()
        self._capacity = capacity
        self._max_waiting = max_waiting

    async def enqueue(self, entry: Entry, waited: float) -> Reply:
        placed = _arrived(entry, waited)
        taken, admitted = self._queue.enqueue(placed, self._capacity(), self._max_waiting)
        return self._reply(admitted, Status.OK if taken else Status.FULL)

    async def remove(self, request_ids: Sequence[str]) -> Reply:
        for request_id in request_ids:
            self._queue.remove(request_id)
        return self._reply(self._queue.admit(self._capacity()))

    async def reassert(self, waiting: Sequence[tuple[Entry, float]], granted: Sequence[Entry]) -> Reply:
        held = {entry.request_id for entry, _ in waiting} | {entry.request_id for entry in granted}
        for request_id in [*self._queue.waiting, *self._queue.granted]:
            if request_id not in held:
                self._queue.remove(request_id)
        for entry in granted:
            self._queue.add_granted(entry)
        for entry, waited in waiting:
            if entry.request_id not in self._queue.waiting and entry.request_id not in self._queue.granted:
                self._queue.add(_arrived(entry, waited))
        self._queue.admit(self._capacity())
        return self._reply([entry for entry, _ in waiting if entry.request_id in self._queue.granted])

    def clear(self) -> None:
        """Forget everything: the shared queue has taken over."""
        self._queue = FairQueue()

    def _reply(self, admitted: Sequence[Entry], status: Status = Status.OK) -> Reply:
        figures = QueueFigures(
            backend="local",
            waiting=len(self._queue.waiting),
            waiting_cost=self._queue.waiting_cost,
            granted=len(self._queue.granted),
            granted_cost=self._queue.granted_cost,
            capacity=self._capacity(),
        )
        return Reply(status, tuple(entry.request_id for entry in admitted), figures)


def _arrived(entry: Entry, waited: float) -> Entry:
    """The entry with its arrival on this process's clock."""
    return replace(entry, arrival=time.monotonic_ns() // 1000 - int(waited * 1e6))
