"""The traffic window, the sizing formula, capacity."""

import pytest

from common.pb.tandem.v1 import worker_pb2
from gateway.capacity import BUSY_SECONDS, FLOOR_TOKENS, prefill_capacity
from gateway.cluster.views import Link, WorkerRole, WorkerView
from gateway.generation import GenerationStats
from gateway.planner.sizing import measured_speeds, size
from gateway.planner.traffic import Traffic, TrafficWindow


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def stats(output: int, transfer: float = 0.0, exposed: float = 0.0) -> GenerationStats:
    details = {
        "transfer_seconds": transfer,
        "transfer_exposed_seconds": exposed,
        "transfer_bytes": 10,
        "transfer_messages": 1,
    }
    return GenerationStats(1, output, 0, details)


def test_window_slides() -> None:
    clock = Clock()
    window = TrafficWindow(window=10, clock=clock)
    for _ in range(5):
        window.arrived(100, 60)
        window.finished(stats(20))
        clock.now += 1
    assert window.traffic == Traffic(1.0, 100.0, 60.0, 20.0)
    clock.now += 7
    # Two of the five are still in the window, which is full now.
    assert window.traffic.arrival_rate == pytest.approx(0.2)
    clock.now += 60
    assert window.traffic == Traffic(0.0, 0.0, 0.0, 0.0)


def test_hidden_share_is_over_transfer_time() -> None:
    window = TrafficWindow()
    assert window.transfers.hidden_share is None
    window.finished(stats(1))
    window.finished(stats(1, transfer=3.0, exposed=0.5))
    window.finished(stats(1, transfer=1.0, exposed=9.0))
    assert window.transfers.hidden_share == pytest.approx(1 - 1.5 / 4)
    assert (window.transfers.requests, window.transfers.bytes) == (2, 20)


@pytest.mark.parametrize(
    ("rate", "uncached", "output", "prefill", "decode", "wanted", "ratio"),
    [
        (10.0, 1000.0, 100.0, 4000.0, 500.0, (3, 2), 1.25),
        (1.0, 1000.0, 100.0, 1000.0, 100.0, (1, 1), 1.0),
        (0.0, 0.0, 0.0, 4000.0, 500.0, (1, 1), None),
        (10.0, 1000.0, 100.0, 0.0, 500.0, (1, 2), None),
    ],
)
def test_formula(
    rate: float, uncached: float, output: float, prefill: float, decode: float, wanted: tuple[int, int], ratio: float
) -> None:
    sizing = size(Traffic(rate, 0.0, uncached, output), prefill, decode)
    assert (sizing.wanted_prefill, sizing.wanted_decode) == wanted
    assert sizing.ratio == ratio


def view(role: WorkerRole, prefill: float = 0.0, decode: float = 0.0, link: Link = Link.LIVE) -> WorkerView:
    status = worker_pb2.WorkerStatus(
        state=worker_pb2.WORKER_STATE_READY, prefill_tokens_per_second=prefill, decode_tokens_per_second=decode
    )
    return WorkerView("a:1", role, link, status=status)


def test_speeds_of_prefill_workers_count_before_local_ones() -> None:
    assert measured_speeds([view("prefill", 100), view("prefill", 300), view("prefill"), view("decode", 50, 20)]) == (
        200,
        20,
    )
    assert measured_speeds([view("prefill"), view("decode", 50, 20)]) == (50, 20)
    assert measured_speeds([WorkerView("a:1", "decode")]) == (0, 0)


def test_capacity_counts_routable_workers() -> None:
    fast = view("prefill", prefill=100_000.0)
    workers = [fast, view("decode"), view("decode", 1e6, link=Link.LOST), WorkerView("b:1", "prefill")]
    assert prefill_capacity(workers) == BUSY_SECONDS * 100_000 + FLOOR_TOKENS
