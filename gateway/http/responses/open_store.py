"""Chooses where responses are kept."""

from redis.asyncio import Redis

from common.redis_keys import Keys
from gateway.http.responses.memory_store import MemoryStore
from gateway.http.responses.redis_store import RedisStore
from gateway.http.responses.store import NoStore, ResponseStore


def open_store(redis: Redis | None, model: str, ttl: float) -> ResponseStore:
    """A store for `ttl` seconds, shared through Redis if there is one; 0 seconds: none."""
    if ttl <= 0:
        return NoStore()
    return MemoryStore(ttl) if redis is None else RedisStore(redis, Keys(model), ttl)
