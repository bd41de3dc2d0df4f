"""What a worker says of itself: over gRPC, and to Prometheus."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import asdict, fields
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.engine.meters import Figures, Snapshot
from common.pb.tandem.v1 import worker_pb2 as pb
from common.pb.tandem.v1 import worker_pb2_grpc
from common.rpc.channel import open_channel
from common.service import status as status_module
from common.service.identity import WorkerIdentity
from common.service.status import StatusCollector, WorkerServicer, fill_engine_status
from tests.factories.rpc import PATIENCE, make_manifest, serving


class Worker:
    def __init__(self) -> None:
        self.status = pb.WorkerStatus(worker_id="d", state=pb.WORKER_STATE_READY)
        self.drains = 0
        self.servicer = WorkerServicer(make_manifest(), lambda: self.status, self._drain)
        self.stub: Any

    def _drain(self) -> None:
        self.drains += 1


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    async with (
        serving(lambda s: worker_pb2_grpc.add_WorkerServicer_to_server(made.servicer, s)) as address,
        open_channel(address) as channel,
    ):
        made.stub = worker_pb2_grpc.WorkerStub(channel)
        yield made


async def test_manifest_status_and_drain(worker: Worker) -> None:
    assert await worker.stub.GetManifest(pb.GetManifestRequest()) == make_manifest()
    assert await worker.stub.GetStatus(pb.GetStatusRequest()) == worker.status
    await worker.stub.Drain(pb.DrainRequest())
    assert worker.drains == 1


async def test_a_watcher_hears_at_once_and_at_each_change(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "WATCH_SECONDS", 3600.0)
    async with asyncio.timeout(PATIENCE):
        watch = aiter(worker.stub.Watch(pb.WatchRequest()))
        assert (await anext(watch)).state == pb.WORKER_STATE_READY
        worker.status = pb.WorkerStatus(worker_id="d", state=pb.WORKER_STATE_DRAINING)
        await worker.servicer.announce_change()
        assert (await anext(watch)).state == pb.WORKER_STATE_DRAINING


async def test_a_watcher_hears_now_and_then_without_a_change(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "WATCH_SECONDS", 0.001)
    async with asyncio.timeout(PATIENCE):
        watch = aiter(worker.stub.Watch(pb.WatchRequest()))
        for running in range(3):
            worker.status = pb.WorkerStatus(running=running)
            while (await anext(watch)).running != running:
                pass


@pytest.mark.parametrize(("role", "prefix"), [(pb.ROLE_PREFILL, "tandem_prefill_"), (pb.ROLE_DECODE, "tandem_decode_")])
def test_every_figure_is_scraped(role: pb.Role, prefix: str) -> None:
    status = pb.WorkerStatus(
        role=role,
        running=1,
        waiting=2,
        queued_tokens=3,
        transfers=4,
        prefill_tokens_per_second=5.5,
        decode_tokens_per_second=6.5,
        paired=["a", "b"],
        refused=["c"],
        accepted_total=7,
        finished_total=8,
        cancelled_total=9,
        failed_total=10,
        preemptions_total=11,
        dropped_messages=12,
        tokens_computed_total=13,
        tokens_cached_total=14,
        tokens_decoded_total=15,
        transfer_bytes_sent_total=16,
        transfer_bytes_received_total=17,
        steps_total=18,
        busy_seconds_total=19.5,
        blocks=pb.BlockCounts(total=60, free=10, cached=20, owned=30),
        staging=pb.StagingCounts(total=6, free=1, granted=2, quarantined=3),
    )
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: status))
    samples = {
        (sample.name.removeprefix(prefix), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert samples == {
        ("running_requests",): 1,
        ("waiting_requests",): 2,
        ("queued_tokens",): 3,
        ("transfers",): 4,
        ("prefill_tokens_per_second",): 5.5,
        ("decode_tokens_per_second",): 6.5,
        ("paired_peers",): 2,
        ("refused_peers",): 1,
        ("requests_accepted_total",): 7,
        ("requests_finished_total",): 8,
        ("requests_cancelled_total",): 9,
        ("requests_failed_total",): 10,
        ("tokens_computed_total",): 13,
        ("tokens_cached_total",): 14,
        ("tokens_decoded_total",): 15,
        ("transfer_bytes_sent_total",): 16,
        ("transfer_bytes_received_total",): 17,
        ("engine_steps_total",): 18,
        ("engine_busy_seconds_total",): 19.5,
        ("preemptions_total",): 11,
        ("dropped_messages_total",): 12,
        ("kv_blocks", "free"): 10,
        ("kv_blocks", "cached"): 20,
        ("kv_blocks", "owned"): 30,
        ("staging_slots", "free"): 1,
        ("staging_slots", "granted"): 2,
        ("staging_slots", "quarantined"): 3,
    }


def test_all_that_an_engine_measures_is_told() -> None:
    counts = [entry.name for entry in fields(Figures)]
    states = [entry.name for entry in fields(Snapshot) if entry.name != "figures"]
    figures = Figures(**{name: 100 + number for number, name in enumerate(counts)})
    snapshot = Snapshot(**{name: 1 + number for number, name in enumerate(states)}, figures=figures)  # type: ignore[arg-type]
    status = pb.WorkerStatus(blocks=pb.BlockCounts(total=6, block_size=16))
    fill_engine_status(status, snapshot)
    blocks = {name: getattr(status.blocks, name) for name in ("free", "cached", "owned")}
    told = {field.name.removesuffix("_total"): value for field, value in status.ListFields()} | blocks
    del told["blocks"]
    assert told == asdict(figures) | {name: getattr(snapshot, name) for name in states}
    assert (status.blocks.total, status.blocks.block_size) == (6, 16)


def test_an_identity_is_new_at_each_start_and_keeps_a_given_id() -> None:
    one, two = WorkerIdentity.new("decode", "pod-3"), WorkerIdentity.new("decode", "pod-3")
    assert one.worker_id == two.worker_id == "pod-3"
    assert one.incarnation != two.incarnation and one.pid == os.getpid()
    drawn = WorkerIdentity.new("prefill", "")
    assert drawn.worker_id.startswith("prefill-") and drawn.worker_id != WorkerIdentity.new("prefill", "").worker_id
