"""What a gateway knows, as JSON for `GET /tandem/status` and as Prometheus gauges. Reads, changes nothing."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.pb.tandem.v1 import worker_pb2 as pb
from gateway.cluster.views import WorkerView
from gateway.planner.sizing import Sizing
from gateway.planner.traffic import TransferTotals
from gateway.queue.interface import QueueFigures

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """A snapshot."""

    gateway_id: str
    model: str
    #: "ready", "waiting" (for a decode worker) or "draining".
    state: str
    #: Requests queued here or being answered.
    running: int
    workers: tuple[WorkerView, ...]
    queue: QueueFigures
    sizing: Sizing
    transfers: TransferTotals


def status_router(provider: Callable[[], GatewayStatus]) -> APIRouter:
    """GET /tandem/status over `provider`."""
    router = APIRouter()

    @router.get("/tandem/status")
    async def status() -> Json:
        return status_json(provider())

    return router


def status_json(status: GatewayStatus) -> Json:
    return {
        "gateway": {
            "id": status.gateway_id,
            "model": status.model,
            "state": status.state,
            "running": status.running,
        },
        "workers": [_worker_json(view) for view in status.workers],
        "queue": asdict(status.queue),
        "ratio": _ratio_json(status.sizing),
        "transfer": asdict(status.transfers),
    }


def _worker_json(view: WorkerView) -> Json:
    status = view.status if view.status is not None else pb.WorkerStatus()
    blocks, staging = status.blocks, status.staging
    return {
        "id": view.worker_id,
        "role": view.role,
        "pid": status.pid,
        "addresses": {"grpc": view.address},
        "incarnation": status.incarnation,
        "state": view.state,
        "reason": view.reason,
        # Seconds since the figures below came; None if none ever did.
        "age": round(time.monotonic() - view.received_at, 3) if view.status is not None else None,
        "blocks": {name: getattr(blocks, name) for name in ("total", "free", "cached", "owned", "block_size")},
        "staging": {name: getattr(staging, name) for name in ("total", "free", "granted", "quarantined")},
        "running": status.running,
        "waiting": status.waiting,
        "queued_tokens": status.queued_tokens,
        "prefill_tokens_per_second": status.prefill_tokens_per_second,
        "decode_tokens_per_second": status.decode_tokens_per_second,
        "max_request_tokens": status.max_request_tokens,
        "paired": list(status.paired),
        "refused": list(status.refused),
        "transfers": status.transfers,
        "dropped_messages": status.dropped_messages,
        "accepted_total": status.accepted_total,
        "finished_total": status.finished_total,
        "cancelled_total": status.cancelled_total,
        "failed_total": status.failed_total,
        "preemptions_total": status.preemptions_total,
    }


def _ratio_json(sizing: Sizing) -> Json:
    return {
        "wanted_prefill": sizing.wanted_prefill,
        "wanted_decode": sizing.wanted_decode,
        "ratio": sizing.ratio,
        **asdict(sizing.traffic),
        "prefill_speed": sizing.prefill_speed,
        "decode_speed": sizing.decode_speed,
    }


class StatusCollector(Collector):
    """The same as metrics, taken at each scrape."""

    def __init__(self, provider: Callable[[], GatewayStatus]) -> None:
        self._provider = provider

    def collect(self) -> Iterator[Metric]:
        status = self._provider()
        yield from _queue_gauges(status.queue)
        yield from _sizing_gauges(status.sizing)
        yield _worker_gauge(status.workers)
        yield from _transfer_metrics(status.transfers)

    def describe(self) -> Iterator[Metric]:
        """Names only: a scrape while the gateway is being built would find nothing to read."""
        return iter(())


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tandem_gateway_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"tandem_gateway_{name}", text, value=value)


def _queue_gauges(queue: QueueFigures) -> Iterator[Metric]:
    yield _gauge("queue_waiting", "Requests that wait for admission", queue.waiting)
    yield _gauge("queue_waiting_tokens", "Prompt tokens that wait for admission", queue.waiting_cost)
    yield _gauge("queue_granted_tokens", "Prompt tokens admitted and not yet computed", queue.granted_cost)
    yield _gauge("queue_capacity_tokens", "Prompt tokens that may be admitted at once", queue.capacity)
    yield _gauge("queue_shared", "1 if the queue is in Redis, 0 if this gateway admits alone", queue.backend == "redis")


def _sizing_gauges(sizing: Sizing) -> Iterator[Metric]:
    wanted = GaugeMetricFamily("tandem_gateway_wanted_workers", "Workers that the traffic wants", labels=["role"])
    wanted.add_metric(["prefill"], sizing.wanted_prefill)
    wanted.add_metric(["decode"], sizing.wanted_decode)
    yield wanted
    if sizing.ratio is not None:
        yield _gauge("wanted_ratio", "Prefill workers wanted per decode worker", sizing.ratio)
    yield _gauge("arrival_rate", "Requests per second over the last minutes", sizing.traffic.arrival_rate)


def _worker_gauge(workers: tuple[WorkerView, ...]) -> Metric:
    gauge = GaugeMetricFamily("tandem_gateway_workers", "Known workers", labels=["role", "state"])
    counts: dict[tuple[str, str], int] = {}
    for view in workers:
        counts[view.role, view.state] = counts.get((view.role, view.state), 0) + 1
    for labels, count in sorted(counts.items()):
        gauge.add_metric(list(labels), count)
    return gauge


def _transfer_metrics(transfers: TransferTotals) -> Iterator[Metric]:
    yield _counter("transfer_bytes", "KV bytes moved for finished requests", transfers.bytes)
    yield _counter("transfer_seconds", "Time of KV transfers for finished requests", transfers.seconds)
    yield _counter("transfer_exposed_seconds", "Its part that compute did not hide", transfers.exposed_seconds)
    if transfers.hidden_share is not None:
        yield _gauge("transfer_hidden_share", "Part of recent transfers hidden behind compute", transfers.hidden_share)
