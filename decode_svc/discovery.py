"""Finds prefill workers to pair with: those configured, and those announced in the registry."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from redis.asyncio import Redis

from common.redis_client import open_redis
from common.registry import REDIS_ERRORS, WorkerRecord, read_workers

_log = logging.getLogger(__name__)

#: How often the registry is read.
INTERVAL_SECONDS = 1.0


class PrefillDiscovery:
    """Calls `want(address)` for every known prefill worker, again and again: pairs are wanted for as long as that."""

    def __init__(self, *, model: str, redis: str, configured: Sequence[str], want: Callable[[str], None]) -> None:
        """`redis`: URL, or empty for configured addresses only."""
        self._model = model
        self._redis_url = redis
        self._configured = configured
        self._want = want

    async def run(self) -> None:
        """Until cancelled."""
        redis = open_redis(self._redis_url) if self._redis_url else None
        try:
            while True:
                announced = [] if redis is None else await self._announced(redis)
                for address in (*self._configured, *announced):
                    self._want(address)
                await asyncio.sleep(INTERVAL_SECONDS)
        finally:
            if redis is not None:
                await redis.aclose()

    async def _announced(self, redis: Redis) -> list[str]:
        try:
            workers: list[WorkerRecord] = await read_workers(redis, self._model)
        except REDIS_ERRORS as error:
            # Pairs live on without it; the announcer has logged the outage.
            _log.debug("registry not readable", extra={"error": str(error)})
            return []
        return [worker.address for worker in workers if worker.role == "prefill"]
