"""Hears from Redis which of this gateway's requests another gateway's step admitted."""

import asyncio
import logging
from collections.abc import Callable

from redis.asyncio import Redis

from common.registry import REDIS_ERRORS

_log = logging.getLogger(__name__)


class WakeUps:
    """A subscription that outlives Redis. A lost message costs a tick of the queue, nothing more."""

    def __init__(self, redis: Redis, channel: str, heard: Callable[[str], None], *, max_backoff: float = 2.0) -> None:
        self._redis = redis
        self._channel = channel
        self._heard = heard
        self._max_backoff = max_backoff
        #: Set while subscribed.
        self.listening = asyncio.Event()

    async def run(self) -> None:
        """Listen until cancelled."""
        backoff = 0.1
        while True:
            try:
                await self._listen()
            except REDIS_ERRORS:
                # The queue itself notices and says so; here it only means that nothing can be heard.
                _log.debug("wake-up subscription broken", exc_info=True)
            backoff = 0.1 if self.listening.is_set() else min(2 * backoff, self._max_backoff)
            self.listening.clear()
            await asyncio.sleep(backoff)

    async def _listen(self) -> None:
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(self._channel)
            while True:
                message = await subscription.get_message(timeout=None)
                if message is None:
                    continue
                if message["type"] == "subscribe":
                    self.listening.set()
                elif message["type"] == "message":
                    self._heard(message["data"])
