"""Responses kept in this process: for a gateway without Redis, and while Redis is away."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.http.responses.store import MAX_BYTES, StoredResponse

_MAX_TOTAL = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Entry:
    encoded: bytes
    expires: float


class MemoryStore:
    """`ResponseStore` that forgets what is too old, and what was used longest ago when it is full."""

    enabled = True

    def __init__(
        self,
        ttl: float = 3600.0,
        *,
        max_bytes: int = MAX_BYTES,
        max_total: int = _MAX_TOTAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            ttl: seconds for which a response is kept.
            max_bytes: longest response that is kept, in bytes, input included.
            max_total: bound on all responses together, in bytes.
        """
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._max_total = max_total
        self._clock = clock
        #: In order of last use.
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        #: Their keys in order of age.
        self._ages: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._total = 0

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        return self.put_encoded(tenant, response_id, stored.encode())

    def put_encoded(self, tenant: str, response_id: str, encoded: bytes) -> bool:
        """As `put`, already encoded."""
        if len(encoded) > min(self._max_bytes, self._max_total):
            return False
        self._forget_old()
        key = tenant, response_id
        self._remove(key)
        self._entries[key] = _Entry(encoded, self._clock() + self._ttl)
        self._ages[key] = None
        self._total += len(encoded)
        while self._total > self._max_total:
            self._remove(next(iter(self._entries)))
        return True

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        self._forget_old()
        entry = self._entries.get((tenant, response_id))
        if entry is None:
            return None
        self._entries.move_to_end((tenant, response_id))
        return StoredResponse.decode(entry.encoded)

    async def delete(self, tenant: str, response_id: str) -> bool:
        self._forget_old()
        return self._remove((tenant, response_id))

    def _forget_old(self) -> None:
        now = self._clock()
        while self._ages and self._entries[oldest := next(iter(self._ages))].expires <= now:
            self._remove(oldest)

    def _remove(self, key: tuple[str, str]) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        del self._ages[key]
        self._total -= len(entry.encoded)
        return True
