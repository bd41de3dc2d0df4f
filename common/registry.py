"""Which workers exist, as Redis knows it: workers announce themselves, gateways read.

The registry tells where to connect and nothing else: whether a worker lives is known from its connection, so a
registry that was emptied or is away evicts nobody.
"""

import asyncio
import json
import logging
import random
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from typing import Literal, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.redis_client import open_redis
from common.redis_keys import Keys

_log = logging.getLogger(__name__)

#: What a failing Redis call may raise: the client lets some socket errors through as they are.
REDIS_ERRORS = (RedisError, OSError)

# Remove a record unless somebody (a new incarnation perhaps) keeps it alive.
# KEYS: 1 workers hash, 2 heartbeat string; ARGV: 1 worker id, 2 incarnation that leaves, or "" if the heartbeat lapsed.
_REMOVE = """
local alive = redis.call('GET', KEYS[2])
if alive and alive ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[2])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One announced worker."""

    #: Stable across restarts where the operator gives it.
    worker_id: str
    role: Literal["prefill", "decode"]
    #: host:port of the worker's gRPC service.
    address: str
    #: New at each start; the same worker id under a new one replaces the old.
    incarnation: str
    #: Name under which the model is served.
    model: str
    pid: int


async def read_workers(redis: Redis, model: str) -> list[WorkerRecord]:
    """Workers of `model` whose heartbeat has not lapsed, by id; lapsed records are swept. Raises REDIS_ERRORS."""
    keys = Keys(model)
    found = await cast(Awaitable[dict[str, str]], redis.hgetall(keys.workers))
    if not found:
        return []
    ids = sorted(found)
    beats = await redis.mget([keys.heartbeat(worker_id) for worker_id in ids])
    live: list[WorkerRecord] = []
    for worker_id, beat in zip(ids, beats, strict=True):
        if beat is None:
            await _remove(redis, keys, worker_id, incarnation="")
        elif (record := _parse(found[worker_id])) is not None:
            live.append(record)
    return live


def _parse(text: str) -> WorkerRecord | None:
    try:
        fields = json.loads(text)
        if fields["role"] not in ("prefill", "decode"):
            raise ValueError(f"role {fields['role']!r}")
        return WorkerRecord(**{name: fields[name] for name in WorkerRecord.__dataclass_fields__})
    except (ValueError, KeyError, TypeError) as error:
        # Another version's record, or somebody else's key: it is no reason to lose the other workers.
        _log.warning("unreadable worker record in Redis", extra={"record": text, "error": repr(error)})
        return None


async def _remove(redis: Redis, keys: Keys, worker_id: str, incarnation: str) -> None:
    await redis.eval(_REMOVE, 2, keys.workers, keys.heartbeat(worker_id), worker_id, incarnation)


def _notice_cancellation() -> None:
    """redis-py swallows a cancellation that comes in the moment in which a call succeeds."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Announcer:
    """Keeps one worker's record in the registry for as long as `run` runs."""

    def __init__(
        self, url: str, record: WorkerRecord, *, interval: float = 2.0, ttl: float = 10.0, max_backoff: float = 5.0
    ) -> None:
        """`interval`: seconds between heartbeats; `ttl`: seconds after which an unrefreshed record lapses."""
        assert 0 < interval < ttl, f"a heartbeat every {interval} s cannot keep a lease of {ttl} s"
        self._redis = open_redis(url)
        self._record = record
        self._keys = Keys(record.model)
        self._interval = interval
        self._ttl_ms = int(ttl * 1000)
        self._max_backoff = max_backoff

    async def run(self) -> None:
        """Announce until cancelled. Redis may be away at any time: tried again with backoff, logged once an outage."""
        failures = 0
        while True:
            try:
                await self._announce()
            except REDIS_ERRORS as error:
                failures += 1
                if failures == 1:
                    _log.warning("cannot announce this worker in Redis; still trying", extra={"error": str(error)})
                await asyncio.sleep(self._backoff(failures))
            else:
                if failures:
                    _log.info("announced in Redis again")
                failures = 0
                _notice_cancellation()
                await asyncio.sleep(self._interval)

    def _backoff(self, failures: int) -> float:
        longest = min(self._max_backoff, 0.1 * 2.0 ** min(failures, 16))
        return longest * random.uniform(0.5, 1.0)

    async def _announce(self) -> None:
        worker_id = self._record.worker_id
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._keys.workers, worker_id, json.dumps(asdict(self._record)))
            pipe.set(self._keys.heartbeat(worker_id), self._record.incarnation, px=self._ttl_ms)
            await pipe.execute()

    async def withdraw(self) -> None:
        """Take the record back (unless a newer incarnation announced itself) and close the client.

        To be called after `run` was cancelled. If Redis is away the record lapses by itself.
        """
        try:
            await _remove(self._redis, self._keys, self._record.worker_id, self._record.incarnation)
        except REDIS_ERRORS as error:
            _log.warning("could not leave the registry; the record will lapse", extra={"error": str(error)})
        finally:
            await self._redis.aclose()
