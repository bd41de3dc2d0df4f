"""What the dispatcher asks of an admission queue, and the values that travel between its parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gateway.generation import RequestClass


class Grant:
    """Leave to send one request to the workers, charged against the cluster's prefill capacity until released."""

    def __init__(self, request_id: str, cost: int, on_release: Callable[[str], None]) -> None:
        self.request_id = request_id
        #: Prompt tokens charged.
        self.cost = cost
        self._on_release: Callable[[str], None] | None = on_release

    def release(self) -> None:
        """Give the capacity back. Never blocks; may be called any number of times."""
        callback, self._on_release = self._on_release, None
        if callback is not None:
            callback(self.request_id)


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """The queue as it was at the last operation; all gateways together if the backend is Redis."""

    backend: str
    #: Requests that wait, and their prompt tokens.
    waiting: int = 0
    waiting_cost: int = 0
    #: Admitted requests that have not yet brought a token, and their prompt tokens.
    granted: int = 0
    granted_cost: int = 0
    #: Prompt tokens that may be admitted at once.
    capacity: int = 0
    #: Gateways with a valid lease.
    gateways: int = 1


class AdmissionQueue(Protocol):
    """Weighted-fair over tenants, interactive before batch, bounded."""

    async def acquire(
        self, request_id: str, tenant: str, klass: RequestClass, cost: int, *, priority: int = 0
    ) -> Grant:
        """Wait for leave to prefill `cost` (at least 1) prompt tokens. Cancelling the task leaves the queue.

        Among the tenant's own requests of the class a lower `priority` (signed 32 bits) goes first.

        Raises Overloaded, with retry_after, at once if the queue is full or closed.
        """
        ...

    def poke(self) -> None:
        """Capacity may have changed: look again. Never blocks."""
        ...

    @property
    def figures(self) -> QueueFigures: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One request as the queue sees it; the prompt stays with the gateway."""

    request_id: str
    gateway: str
    tenant: str
    request_class: RequestClass
    #: Prompt tokens, at least 1.
    cost: int
    #: Share of its tenant relative to the others, at least 1.
    weight: int
    #: When it came, on the clock of whoever orders the queue (microseconds).
    arrival: int
    #: Lower is earlier, within its tenant's line; signed 32 bits.
    priority: int = 0


class Status(Enum):
    """How a backend took an operation."""

    OK = "ok"
    #: The bound is reached and the entry was not taken.
    FULL = "full"
    #: The backend does not know this gateway (any more): assert everything, then repeat.
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Reply:
    """Outcome of one backend operation."""

    status: Status
    #: Requests of the asking gateway that are admitted now.
    granted: tuple[str, ...]
    figures: QueueFigures


class Backend(Protocol):
    """Where the queue of all gateways, or of this one alone, is ordered. Every operation is idempotent."""

    async def enqueue(self, entry: Entry, waited: float) -> Reply:
        """Add an entry that has waited for `waited` seconds already."""
        ...

    async def remove(self, request_ids: Sequence[str]) -> Reply:
        """Forget entries and grants, whichever they are now."""
        ...

    async def reassert(self, waiting: Sequence[tuple[Entry, float]], granted: Sequence[Entry]) -> Reply:
        """Make this gateway's part of the queue equal to what it holds, and renew its lease.

        `waiting` comes with the seconds each has waited. What the backend admitted in between stays admitted and is
        returned.
        """
        ...
