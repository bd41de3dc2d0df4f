"""This gateway's end of the queue: its waiting requests and its grants, and the backend that orders them now.

What this gateway holds (`_tickets`) is the truth and both backends follow it, so nothing is lost when one goes:
1. `acquire` makes a ticket, puts an enqueue operation into the outbox and waits for the ticket's future.
2. One task takes operations from the outbox and applies them in order to the backend in use.
3. When Redis fails, that task asserts all tickets to the local backend and goes on there at once; a second task looks
   for Redis, and when it is back, everything is asserted to it.
4. Every few seconds, and when Redis says that it does not know us (restarted empty, flushed, lease lapsed), all tickets
   are asserted again; this also finds admissions whose wake-up message was lost.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from redis.asyncio import Redis

from common.errors import Overloaded
from common.redis_keys import Keys
from common.registry import REDIS_ERRORS
from gateway.generation import RequestClass
from gateway.queue.interface import Backend, Entry, Grant, QueueFigures, Reply, Status
from gateway.queue.local import LocalBackend
from gateway.queue.shared import SharedBackend
from gateway.queue.tickets import Enqueue, Operation, Remove, Ticket, retry_after
from gateway.queue.wakeups import WakeUps
from gateway.tasks import OnDeath, end, spawn

_log = logging.getLogger(__name__)

#: Seconds before Redis is asked again after it failed; doubled each time.
_FIRST_BACKOFF = 0.1


class GatewayQueue:
    """AdmissionQueue over Redis with a local stand-in. `start` before use, `close` after."""

    def __init__(
        self,
        redis: Redis | None,
        model: str,
        gateway_id: str,
        *,
        capacity: Callable[[], int],
        speed: Callable[[], float],
        max_waiting: int = 1024,
        weights: Callable[[str], int] = lambda tenant: 1,
        tick: float = 2.0,
        lease: float = 10.0,
        max_backoff: float = 2.0,
        on_death: OnDeath | None = None,
    ) -> None:
        """
        Args:
            redis: client, owned by the caller; None: always the local queue.
            capacity: prompt tokens that the cluster may prefill at once.
            speed: prompt tokens per second that the cluster prefills, for Retry-After.
            max_waiting: bound on waiting requests, over all gateways.
            weights: share of a tenant relative to others, at least 1.
            tick: seconds between assertions of everything held.
            lease: seconds after which what a silent gateway holds lapses.
            on_death: told if a task of the queue ends by itself: from then on nobody is admitted any more.
        """
        assert tick < lease, f"an assertion every {tick} s cannot keep a lease of {lease} s"
        self._gateway = gateway_id
        self._capacity = capacity
        self._speed = speed
        self._weights = weights
        self._tick = tick
        self._max_backoff = max_backoff
        self._on_death = on_death
        self._redis = redis
        self._gateways = 1
        self._local = LocalBackend(capacity=self._local_capacity, max_waiting=max_waiting)
        keys = Keys(model)
        self._shared = (
            SharedBackend(redis, keys, gateway_id, lease=lease, capacity=capacity, max_waiting=max_waiting)
            if redis is not None
            else None
        )
        self._wakeups = WakeUps(redis, keys.wake(gateway_id), self._woken) if redis is not None else None
        # Local until Redis has answered the first time.
        self._backend: Backend = self._local
        self._tickets: dict[str, Ticket] = {}
        self._outbox: deque[Operation] = deque()
        self._assert_due = True
        self._next_tick = 0.0
        self._backoff = _FIRST_BACKOFF
        self._news = asyncio.Event()
        self._redis_back = asyncio.Event()
        self._redis_lost = asyncio.Event()
        self._redis_lost.set()
        self._figures = QueueFigures("local")
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def figures(self) -> QueueFigures:
        return self._figures

    async def start(self) -> None:
        """Try Redis once, then serve from it or from the local queue."""
        if self._shared is not None:
            try:
                await self._switch_to_shared()
            except REDIS_ERRORS as error:
                _log.warning("Redis is away; admitting locally", extra={"error": str(error)})
            self._spawn(self._look_for_redis(), "queue-redis")
        if self._wakeups is not None:
            self._spawn(self._wakeups.run(), "queue-wakeups")
        self._spawn(self._work(), "queue")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(spawn(work, name, self._on_death))

    async def close(self) -> None:
        """Refuse everyone who waits and give up the lease. Idempotent."""
        self._closed = True
        await end(self._tasks)
        self._tasks.clear()
        for ticket in self._tickets.values():
            ticket.refuse(Overloaded("the gateway is shutting down"))
        self._tickets.clear()
        if self._shared is not None and self._backend is self._shared:
            # If Redis is away now, the lease lapses by itself.
            with contextlib.suppress(*REDIS_ERRORS):
                await self._shared.leave()

    def poke(self) -> None:
        self._assert_due = True
        self._news.set()

    async def acquire(
        self, request_id: str, tenant: str, klass: RequestClass, cost: int, *, priority: int = 0
    ) -> Grant:
        assert request_id not in self._tickets, f"request {request_id} is already in the queue"
        if self._closed:
            raise Overloaded("the gateway is shutting down")
        weight = self._weights(tenant)
        entry = Entry(request_id, self._gateway, tenant, klass, max(1, cost), weight, arrival=0, priority=priority)
        ticket = Ticket(entry, time.monotonic(), asyncio.get_running_loop().create_future())
        self._tickets[request_id] = ticket
        self._push(Enqueue(ticket))
        try:
            await ticket.admitted
        except BaseException:
            # Refused or cancelled, perhaps in the very moment of being admitted.
            self._forget(request_id)
            raise
        return Grant(request_id, entry.cost, self._forget)

    def _forget(self, request_id: str) -> None:
        if self._tickets.pop(request_id, None) is not None:
            self._push(Remove(request_id))

    def _push(self, operation: Operation) -> None:
        self._outbox.append(operation)
        self._news.set()

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()

    def _local_capacity(self) -> int:
        # Each gateway takes an equal part of the capacity while they cannot see each other.
        return self._capacity() // self._gateways

    # --- the task that talks to the backend ---------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await self._wait_for_news()
            if self._redis_back.is_set():
                self._redis_back.clear()
                await self._return_to_shared()
            operations = list(self._outbox)
            self._outbox.clear()
            await self._apply_all(operations)

    async def _wait_for_news(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_tick):
                await self._news.wait()
        self._news.clear()

    async def _apply_all(self, operations: list[Operation]) -> None:
        try:
            if self._assert_due or self._loop_time() >= self._next_tick:
                await self._assert_everything()
            while operations:
                await self._apply(operations[0])
                operations.pop(0)
        except REDIS_ERRORS as error:
            _log.warning("Redis is away; admitting locally", extra={"error": str(error)})
            self._backend = self._local
            self._redis_lost.set()
            await self._assert_everything()
            for operation in operations:
                await self._apply(operation)

    async def _apply(self, operation: Operation) -> None:
        reply = await self._send(operation)
        if reply.status is Status.LOST:
            await self._assert_everything()
            reply = await self._send(operation)
        if isinstance(operation, Enqueue):
            operation.ticket.taken = True
            if reply.status is Status.FULL:
                message = f"the queue is full: {reply.figures.waiting} requests wait"
                seconds = retry_after(reply.figures, self._speed())
                operation.ticket.refuse(Overloaded(message, retry_after=seconds))
        self._take(reply)

    async def _send(self, operation: Operation) -> Reply:
        if isinstance(operation, Remove):
            return await self._backend.remove([operation.request_id])
        ticket = operation.ticket
        if self._tickets.get(ticket.entry.request_id) is not ticket:
            # Cancelled before its turn: there is nothing to add.
            return Reply(Status.OK, (), self._figures)
        return await self._backend.enqueue(ticket.entry, ticket.waited)

    async def _assert_everything(self) -> None:
        self._assert_due = False
        self._next_tick = self._loop_time() + self._tick
        tickets = [ticket for ticket in self._tickets.values() if ticket.taken]
        waiting = [(ticket.entry, ticket.waited) for ticket in tickets if not ticket.granted]
        granted = [ticket.entry for ticket in tickets if ticket.granted]
        self._take(await self._backend.reassert(waiting, granted))

    def _take(self, reply: Reply) -> None:
        self._figures = reply.figures
        self._gateways = max(1, reply.figures.gateways) if reply.figures.backend == "redis" else self._gateways
        for request_id in reply.granted:
            self._admit(request_id)

    def _admit(self, request_id: str) -> None:
        # One that was cancelled meanwhile is unknown here; its removal is in the outbox.
        if (ticket := self._tickets.get(request_id)) is not None:
            ticket.admit()

    # --- Redis coming and going ---------------------------------------------------------------------

    def _woken(self, request_id: str) -> None:
        """Another gateway's step admitted a request of ours."""
        if self._backend is self._shared:
            self._admit(request_id)

    async def _look_for_redis(self) -> None:
        """While the local queue serves, ask Redis now and then, without holding up anyone."""
        assert self._redis is not None
        while True:
            await self._redis_lost.wait()
            await asyncio.sleep(self._backoff * random.uniform(0.5, 1.0))
            self._backoff = min(2 * self._backoff, self._max_backoff)
            with contextlib.suppress(*REDIS_ERRORS):
                await self._redis.ping()
                self._redis_lost.clear()
                self._redis_back.set()
                self._news.set()

    async def _return_to_shared(self) -> None:
        try:
            await self._switch_to_shared()
        except REDIS_ERRORS as error:
            _log.debug("Redis answered a ping and then failed", extra={"error": str(error)})
            self._backend = self._local
            self._redis_lost.set()
        else:
            _log.info("Redis is back; admitting through it again")

    async def _switch_to_shared(self) -> None:
        assert self._shared is not None
        self._backend = self._shared
        await self._assert_everything()
        self._redis_lost.clear()
        self._backoff = _FIRST_BACKOFF
        self._local.clear()
