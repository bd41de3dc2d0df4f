"""All workers of one model: the peers named at start and those in the registry, each followed by a WorkerWatch.

The registry only adds addresses. A worker leaves when it is neither configured nor announced *and* its connection is
gone, so an emptied registry, or Redis being away, changes nothing for those that are connected.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from redis.asyncio import Redis

from common.registry import REDIS_ERRORS, WorkerRecord, read_workers
from gateway.cluster.views import Expectation, Link, WorkerRole, WorkerView
from gateway.cluster.watch import WorkerWatch
from gateway.tasks import OnDeath, end, spawn

_log = logging.getLogger(__name__)

#: Seconds that a lost worker nobody announces any more stays in sight.
FORGET_SECONDS = 30.0

Listener = Callable[[WorkerView], None]
#: Takes the id of a worker.
GoneListener = Callable[[str], None]


class Cluster:
    """Live view of the workers. `start` before use, `close` after."""

    def __init__(
        self,
        expected: Expectation,
        *,
        peers: Iterable[tuple[WorkerRole, str]] = (),
        redis: Redis | None = None,
        registry_interval: float = 1.0,
        forget_after: float = FORGET_SECONDS,
        on_death: OnDeath | None = None,
    ) -> None:
        """
        Args:
            peers: (role, address) of workers that need no registry.
            redis: client, owned by the caller; None: no registry.
            registry_interval: seconds between two looks into the registry.
            on_death: told if a task of the cluster ends by itself: from then on what is known here is out of date.
        """
        self._expected = expected
        self._static = {address: role for role, address in peers}
        self._redis = redis
        self._registry_interval = registry_interval
        self._forget_after = forget_after
        self._on_death = on_death
        self._watches: dict[str, tuple[WorkerWatch, asyncio.Task[None]]] = {}
        self._announced: set[str] = set()
        self._listeners: list[Listener] = []
        self._gone_listeners: list[GoneListener] = []
        #: Ids that listeners have heard of and that are not yet gone.
        self._ids: set[str] = set()
        self._news = asyncio.Event()
        self._registry_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for address, role in self._static.items():
            self._follow(address, role)
        if self._redis is not None:
            self._registry_task = spawn(self._read_registry(self._redis), "cluster-registry", self._on_death)

    async def close(self) -> None:
        tasks = [task for _, task in self._watches.values()]
        if self._registry_task is not None:
            tasks.append(self._registry_task)
        await end(tasks)
        self._watches.clear()

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` on the event loop with each new view of a worker."""
        self._listeners.append(listener)

    def add_gone_listener(self, listener: GoneListener) -> None:
        """Call `listener` on the event loop with each id that no known worker has any more."""
        self._gone_listeners.append(listener)

    def workers(self) -> list[WorkerView]:
        """Everyone known, by id. Under one id the connected one counts, and of two the one heard of last."""
        best: dict[str, WorkerView] = {}
        for watch, _ in self._watches.values():
            view = watch.view
            known = best.get(view.worker_id)
            if known is None or _standing(view) > _standing(known):
                best[view.worker_id] = view
        return [best[worker_id] for worker_id in sorted(best)]

    def routable(self, role: WorkerRole) -> list[WorkerView]:
        """Workers of that role that take new work, by id."""
        return [view for view in self.workers() if view.role == role and view.routable]

    async def changed(self) -> None:
        """Wait for the next news of any worker."""
        await self._news.wait()

    # --- membership ---------------------------------------------------------------------------------

    def _follow(self, address: str, role: WorkerRole) -> None:
        if address not in self._watches:
            watch = WorkerWatch(address, role, self._expected, self._on_change)
            self._watches[address] = (watch, spawn(watch.run(), f"watch {role} {address}", self._on_death))

    async def _follow_announced(self, record: WorkerRecord) -> None:
        known = self._watches.get(record.address)
        if known is not None and known[0].view.role != record.role and record.address not in self._static:
            # A port that was taken over by a worker of the other role.
            await end([self._watches.pop(record.address)[1]])
        self._follow(record.address, record.role)

    def _on_change(self, watch: WorkerWatch) -> None:
        # Wake who waits now; who comes later waits for the next news.
        self._news.set()
        self._news = asyncio.Event()
        for listener in self._listeners:
            listener(watch.view)
        self._tell_who_is_gone()

    def _tell_who_is_gone(self) -> None:
        """A worker was forgotten, or is another one under its old address, or has told its id for the first time."""
        now = {watch.view.worker_id for watch, _ in self._watches.values()}
        gone, self._ids = self._ids - now, now
        for worker_id in gone:
            for listener in self._gone_listeners:
                listener(worker_id)

    async def _read_registry(self, redis: Redis) -> None:
        outage = False
        while True:
            try:
                records = await read_workers(redis, self._expected.model)
            except REDIS_ERRORS as error:
                if not outage:
                    _log.warning("cannot read the worker registry; known workers stay", extra={"error": str(error)})
                outage = True
            else:
                outage = False
                self._announced = {record.address for record in records}
                for record in records:
                    await self._follow_announced(record)
                await self._forget_the_gone()
            await asyncio.sleep(self._registry_interval)

    async def _forget_the_gone(self) -> None:
        now = time.monotonic()
        gone = [
            address
            for address, (watch, _) in self._watches.items()
            if address not in self._static
            and address not in self._announced
            and watch.view.link is Link.LOST
            and now - watch.lost_since > self._forget_after
        ]
        for address in gone:
            _log.info("worker forgotten", extra={"address": address})
            await end([self._watches.pop(address)[1]])
        self._tell_who_is_gone()


def _standing(view: WorkerView) -> tuple[bool, bool, float]:
    return view.link is Link.LIVE, view.link is Link.REFUSED, view.received_at
