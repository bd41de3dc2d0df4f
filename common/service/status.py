"""The Worker service, alike on both roles, and the same figures for Prometheus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc.aio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.engine.meters import Snapshot
from common.pb.tandem.v1 import worker_pb2 as pb
from common.pb.tandem.v1 import worker_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

WATCH_SECONDS = 1.0


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Says what a worker is and how it is doing."""

    def __init__(self, manifest: pb.Manifest, status: Callable[[], pb.WorkerStatus], drain: Callable[[], None]) -> None:
        """`status` takes a snapshot without blocking; `drain` starts what SIGTERM starts."""
        self._manifest = manifest
        self._status = status
        self._drain = drain
        self._changed = asyncio.Condition()
        self._num_changes = 0

    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> pb.Manifest:
        return self._manifest

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.WorkerStatus:
        return self._status()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WorkerStatus]:
        while True:
            # Counted, so that a change that comes while a snapshot is being sent is not missed.
            seen = self._num_changes
            yield self._status()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_for_change(seen), WATCH_SECONDS)

    async def _wait_for_change(self, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_changes != seen)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._drain()
        return pb.DrainResponse()

    async def announce_change(self) -> None:
        """Let every watcher see the new state now."""
        async with self._changed:
            self._num_changes += 1
            self._changed.notify_all()


def fill_engine_status(status: pb.WorkerStatus, snapshot: Snapshot) -> None:
    """Put an engine's figures into a worker's status."""
    figures = snapshot.figures
    status.blocks.free, status.blocks.cached, status.blocks.owned = snapshot.free, snapshot.cached, snapshot.owned
    status.running, status.waiting, status.transfers = snapshot.running, snapshot.waiting, snapshot.transfers
    status.queued_tokens = snapshot.queued_tokens
    status.prefill_tokens_per_second = snapshot.prefill_tokens_per_second
    status.decode_tokens_per_second = snapshot.decode_tokens_per_second
    status.preemptions_total = snapshot.preemptions
    status.accepted_total, status.finished_total = figures.accepted, figures.finished
    status.cancelled_total, status.failed_total = figures.cancelled, figures.failed
    status.tokens_computed_total, status.tokens_cached_total = figures.tokens_computed, figures.tokens_cached
    status.tokens_decoded_total = figures.tokens_decoded
    status.steps_total, status.busy_seconds_total = figures.steps, figures.busy_seconds


#: Prometheus name, help, and how to read it.
_GAUGES: tuple[tuple[str, str, Callable[[pb.WorkerStatus], float]], ...] = (
    ("running_requests", "Requests in the batch.", lambda s: s.running),
    ("waiting_requests", "Accepted requests that wait for blocks.", lambda s: s.waiting),
    ("queued_tokens", "Prompt tokens accepted and not yet computed.", lambda s: s.queued_tokens),
    ("transfers", "KV transfers in flight.", lambda s: s.transfers),
    ("prefill_tokens_per_second", "Measured prefill speed.", lambda s: s.prefill_tokens_per_second),
    ("decode_tokens_per_second", "Measured decode speed.", lambda s: s.decode_tokens_per_second),
    ("paired_peers", "Peers that this worker is paired with.", lambda s: len(s.paired)),
    ("refused_peers", "Peers that do not fit this worker.", lambda s: len(s.refused)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[pb.WorkerStatus], float]], ...] = (
    ("requests_accepted", "Requests accepted.", lambda s: s.accepted_total),
    ("requests_finished", "Requests that ended well.", lambda s: s.finished_total),
    ("requests_cancelled", "Requests cancelled by their clients.", lambda s: s.cancelled_total),
    ("requests_failed", "Requests that failed.", lambda s: s.failed_total),
    ("preemptions", "Sequences that lost their blocks.", lambda s: s.preemptions_total),
    ("tokens_computed", "Prompt and recomputed tokens.", lambda s: s.tokens_computed_total),
    ("tokens_cached", "Prompt tokens found in the prefix cache.", lambda s: s.tokens_cached_total),
    ("tokens_decoded", "Output tokens.", lambda s: s.tokens_decoded_total),
    ("transfer_bytes_sent", "KV bytes sent.", lambda s: s.transfer_bytes_sent_total),
    ("transfer_bytes_received", "KV bytes received.", lambda s: s.transfer_bytes_received_total),
    ("engine_steps", "Engine steps.", lambda s: s.steps_total),
    ("engine_busy_seconds", "Time spent in engine steps.", lambda s: s.busy_seconds_total),
    ("dropped_messages", "KV messages dropped as duplicate, late, truncated or foreign.", lambda s: s.dropped_messages),
)


class StatusCollector(Collector):
    """Turns the worker's status into metrics at each scrape."""

    def __init__(self, status: Callable[[], pb.WorkerStatus]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        prefix = "tandem_prefill_" if status.role == pb.ROLE_PREFILL else "tandem_decode_"
        for name, text, read in _GAUGES:
            yield GaugeMetricFamily(prefix + name, text, value=read(status))
        for name, text, read in _COUNTERS:
            yield CounterMetricFamily(prefix + name, text, value=read(status))
        blocks = GaugeMetricFamily(prefix + "kv_blocks", "KV blocks by state.", labels=["state"])
        for state in ("free", "cached", "owned"):
            blocks.add_metric([state], getattr(status.blocks, state))
        yield blocks
        staging = GaugeMetricFamily(prefix + "staging_slots", "Staging slots by state.", labels=["state"])
        for state in ("free", "granted", "quarantined"):
            staging.add_metric([state], getattr(status.staging, state))
        yield staging
