"""Responses kept in Redis, for all gateways; this process stands in while Redis is away."""

import logging
import math
import time
from collections.abc import Callable

from redis.asyncio import Redis

from common.errors import StoreUnavailable
from common.redis_keys import Keys
from common.registry import REDIS_ERRORS
from gateway.http.responses.memory_store import MemoryStore
from gateway.http.responses.store import MAX_BYTES, StoredResponse

_log = logging.getLogger(__name__)

#: Seconds for which nothing is written to a Redis that failed: a hung one must not hold up the end of every answer.
_PAUSE = 5.0


class RedisStore:
    """`ResponseStore` shared by all gateways of one model.

    What could not be written to Redis (away, or full) is kept in this process, where only this gateway finds it, for
    the same time. Whoever asks for something that is not here while Redis is away is told so, not that it is gone.
    """

    enabled = True

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        ttl: float,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            redis: client, owned by the caller.
            ttl: seconds for which a response is kept, at least one.
            max_bytes: longest response that is kept, in bytes, input included.
        """
        self._redis = redis
        self._keys = keys
        self._seconds = max(1, math.ceil(ttl))
        self._max_bytes = max_bytes
        self._local = MemoryStore(ttl, max_bytes=max_bytes)
        self._clock = clock
        self._paused_until = -math.inf

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        encoded = stored.encode()
        if len(encoded) > self._max_bytes:
            return False
        return await self._write(tenant, response_id, encoded) or self._local.put_encoded(tenant, response_id, encoded)

    async def _write(self, tenant: str, response_id: str, encoded: bytes) -> bool:
        if self._clock() < self._paused_until:
            return False
        try:
            await self._redis.set(self._keys.response(tenant, response_id), encoded, ex=self._seconds)
        except REDIS_ERRORS as error:
            self._paused_until = self._clock() + _PAUSE
            _log.warning("responses are kept in this gateway only for now", extra={"error": type(error).__name__})
            return False
        return True

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        if (kept_here := await self._local.get(tenant, response_id)) is not None:
            return kept_here
        try:
            text = await self._redis.get(self._keys.response(tenant, response_id))
        except REDIS_ERRORS as error:
            raise StoreUnavailable("stored responses cannot be read now", retry_after=1) from error
        return None if text is None else StoredResponse.decode(str(text).encode())

    async def delete(self, tenant: str, response_id: str) -> bool:
        try:
            removed = await self._redis.delete(self._keys.response(tenant, response_id))
        except REDIS_ERRORS as error:
            raise StoreUnavailable("stored responses cannot be deleted now", retry_after=1) from error
        return await self._local.delete(tenant, response_id) or bool(removed)
