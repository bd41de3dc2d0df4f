"""The queue of all gateways together: calls the Lua operations in Redis. Knows no task and no waiting request."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from common.redis_keys import Keys
from gateway.generation import RequestClass
from gateway.queue.interface import Entry, QueueFigures, Reply, Status


@dataclass(frozen=True, slots=True)
class Script:
    """One operation: the shared prelude and its own file."""

    source: str
    sha: str


def load_script(operation: str) -> Script:
    """Read `lua/<operation>.lua` from the package."""
    folder = resources.files("gateway.queue").joinpath("lua")
    source = "".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in ("prelude", operation))
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


class SharedBackend:
    """Backend in Redis. Its calls raise REDIS_ERRORS (common.registry) when Redis is away or slow.

    Calls must come one after the other: the order in which Redis sees enqueue and remove of one request matters.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        gateway_id: str,
        *,
        lease: float,
        capacity: Callable[[], int],
        max_waiting: int,
    ) -> None:
        """`lease`: seconds after which what this gateway holds lapses, counted from its last call."""
        self._redis = redis
        self._gateway = gateway_id
        self._lease_ms = int(lease * 1000)
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._wake_prefix = keys.wake("")
        self._keys = (
            keys.gateways,
            keys.entries,
            keys.order,
            keys.grants,
            keys.meta,
            *(keys.active(name.value) for name in RequestClass),
            *(keys.idle(name.value) for name in RequestClass),
        )
        self._enqueue, self._remove, self._reassert, self._leave = (
            load_script(name) for name in ("enqueue", "remove", "reassert", "leave")
        )

    async def enqueue(self, entry: Entry, waited: float) -> Reply:
        return await self._call(self._enqueue, *_row(entry, waited), self._max_waiting)

    async def remove(self, request_ids: Sequence[str]) -> Reply:
        return await self._call(self._remove, *request_ids)

    async def reassert(self, waiting: Sequence[tuple[Entry, float]], granted: Sequence[Entry]) -> Reply:
        held = {
            "waiting": [_row(entry, waited) for entry, waited in waiting],
            "granted": [[entry.request_id, entry.cost] for entry in granted],
        }
        return await self._call(self._reassert, json.dumps(held))

    async def leave(self) -> Reply:
        """Give up the lease and everything held under it."""
        return await self._call(self._leave)

    async def _call(self, script: Script, *arguments: str | int) -> Reply:
        capacity = self._capacity()
        common = (self._gateway, self._lease_ms, capacity, self._wake_prefix)
        everything = (*self._keys, *common, *arguments)
        try:
            answer: list[Any] = await self._redis.evalsha(script.sha, len(self._keys), *everything)
        except NoScriptError:
            # A new or restarted server: EVAL also makes it known for the next time.
            answer = await self._redis.eval(script.source, len(self._keys), *everything)
        status, waiting, waiting_cost, granted, granted_cost, gateways, *ids = answer
        figures = QueueFigures("redis", waiting, waiting_cost, granted, granted_cost, capacity, gateways)
        return Reply(Status(status), tuple(ids), figures)


def _row(entry: Entry, waited: float) -> tuple[str, str, str, int, int, int, int]:
    return (
        entry.request_id,
        entry.tenant,
        entry.request_class.value,
        entry.cost,
        entry.weight,
        int(waited * 1e6),
        entry.priority,
    )
