"""How many prompt tokens may be on their way to the workers at once: enough to keep them busy, so few that the queue
and not a worker's own line decides who is next."""

from collections.abc import Iterable

from gateway.cluster.views import WorkerView

#: Work that a worker may have before it, in seconds of its measured speed.
BUSY_SECONDS = 4.0
#: Prompt tokens for a worker that is slow or has not measured itself.
FLOOR_TOKENS = 2048


def prefill_capacity(workers: Iterable[WorkerView]) -> int:
    """Prompt tokens over all routable workers; decode workers prefill locally, so they count too."""
    return sum(max(FLOOR_TOKENS, int(BUSY_SECONDS * speed)) for speed in _speeds(workers))


def prefill_speed(workers: Iterable[WorkerView]) -> float:
    """Prompt tokens per second over all routable workers; 0 if nothing is measured."""
    return sum(_speeds(workers))


def _speeds(workers: Iterable[WorkerView]) -> list[float]:
    return [view.status.prefill_tokens_per_second for view in workers if view.routable and view.status is not None]
