"""Both real transports between real processes: UCX as it chooses, UCX over TCP alone as between hosts, and gRPC."""

import importlib
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kv_store.processes import Endpoint, Pair

TRANSPORTS = ["ucx", "ucx:tcp,self", "grpc"]
TOKENS = 300 * 16
Start = Callable[..., Endpoint]


def require_ucx() -> None:
    """On Linux the install brings nixl: not to find what the product would find is a failure there, never a skip."""
    try:
        importlib.import_module("kv_store.transport.ucx")
    except (ImportError, OSError, RuntimeError) as error:
        if sys.platform == "linux":
            pytest.fail(f"UCX cannot be tested: {error!r}")
        pytest.skip(f"no UCX on {sys.platform}: {error!r}")


@pytest.fixture(params=TRANSPORTS)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts endpoints on one transport; they end with the test."""
    if request.param.startswith("ucx"):
        require_ucx()
    endpoints: list[Endpoint] = []

    def start_one(name: str, **options: Any) -> Endpoint:
        endpoints.append(Endpoint(name, request.param, **options))
        return endpoints[-1]

    yield start_one
    for endpoint in endpoints:
        if endpoint.process.poll() is None:
            endpoint.process.send_signal(signal.SIGCONT)
        status = endpoint.close()
        assert status in (0, -signal.SIGKILL), f"{endpoint.name} ended with {status}"


def assert_nothing_is_lost(pair: Pair) -> None:
    counters = pair.receiver.wait_for_counters(lambda c: c["open_receives"] == 0)
    assert counters["failure"] == "None"
    assert counters["staging"]["quarantined"] == 0
    assert counters["staging"]["free"] + counters["staging"]["granted"] == 8
    sender = pair.sender.wait_for_counters(lambda c: c["open_sends"] == 0)
    assert (sender["writes_in_flight"], sender["send_buffers_in_use"], sender["failure"]) == (0, 0, "None")


def test_twenty_transfers_at_once_land_whole(start: Start) -> None:
    pair = Pair(start("sender", seed=1), start("receiver", seed=2, shape=[6, 700, 7, 2, 8]))
    rng = random.Random(0)
    sources = {number: rng.sample(range(TOKENS), rng.choice([1, 15, 16, 17, 130, 300])) for number in range(1, 21)}
    free = rng.sample(range(700 * 7), 700 * 7)
    targets = {number: [free.pop() for _ in source] for number, source in sources.items()}
    for number, source in sources.items():
        pair.start(number, source, targets[number], chunk=rng.choice([16, 100]), layer_seconds=rng.choice([0, 0.002]))
    for number, source in sources.items():
        finished = pair.receiver.wait("ReceiveFinished", transfer_id=number)
        assert finished["outcome"] == "ok", finished
        assert pair.receiver.digest(targets[number]) == pair.sender.digest(source)
    assert_nothing_is_lost(pair)
    counters = pair.receiver.counters()
    assert counters["bytes_received"] == sum(map(len, sources.values())) * 6 * 2 * 2 * 8 * 4
    assert not any(counters["dropped"].values())


@pytest.mark.slow
def test_aborts_midway_free_both_sides_and_later_transfers_work(start: Start) -> None:
    pair = Pair(start("sender"), start("receiver"))
    slots = list(range(1000))
    for number, who in [(1, "sender"), (2, "receiver"), (3, "both")]:
        pair.start(number, slots, slots, close=False)
        pair.credited.acquire()
        if who != "sender":
            pair.receiver.do("abort_receive", transfer_id=number)
            assert pair.receiver.wait("ReceiveFinished", transfer_id=number)["outcome"] == "aborted"
        pair.sender.do("abort_send", transfer_id=number)
        assert pair.sender.wait("SendFinished", transfer_id=number)["outcome"] == "aborted"
        pair.receiver.do("abort_receive", transfer_id=number)
        assert pair.receiver.wait("ReceiveFinished", transfer_id=number)["outcome"] == "aborted"
    pair.start(4, slots, slots)
    assert pair.receiver.wait("ReceiveFinished", transfer_id=4)["outcome"] == "ok"
    assert_nothing_is_lost(pair)


@pytest.mark.slow
def test_a_receiver_that_is_killed_in_mid_write_fails_its_sends(start: Start) -> None:
    pair = Pair(start("sender"), start("receiver"))
    pair.start(1, [1, 2, 3], [4, 5, 6])
    assert pair.receiver.wait("ReceiveFinished", transfer_id=1)["outcome"] == "ok"
    pair.receiver.process.send_signal(signal.SIGSTOP)
    pair.sender.do("send", transfer_id=2, peer="receiver", slots=list(range(2000)), chunk=500)
    pair.sender.wait_for_counters(lambda c: c["writes_in_flight"] > 0)
    pair.receiver.kill()
    assert pair.sender.wait("SendFinished", transfer_id=2)["outcome"] == "failed"
    pair.sender.wait("PeerLost", peer="receiver")
    counters = pair.sender.wait_for_counters(lambda c: c["writes_in_flight"] == 0)
    assert (counters["peers"], counters["send_buffers_in_use"], counters["failure"]) == (0, 0, "None")

    successor = start("receiver-2")
    again = Pair(pair.sender, successor)
    again.start(3, list(range(500)), list(range(500)))
    assert successor.wait("ReceiveFinished", transfer_id=3)["outcome"] == "ok"
    assert_nothing_is_lost(again)


@pytest.mark.slow
def test_a_sender_that_is_killed_leaves_no_slot_behind(start: Start) -> None:
    pair = Pair(start("sender"), start("receiver"))
    pair.start(1, list(range(3000)), list(range(3000)), layer_seconds=0.001, close=False)
    pair.credited.acquire()
    pair.sender.kill()
    pair.receiver.do("disconnect", peer="sender")
    assert pair.receiver.wait("ReceiveFinished", transfer_id=1)["outcome"] == "failed"
    pair.receiver.wait_for_counters(lambda c: c["staging"]["free"] == 8)

    again = Pair(start("sender-2"), pair.receiver)
    again.start(2, list(range(500)), list(range(500)))
    assert pair.receiver.wait("ReceiveFinished", transfer_id=2)["outcome"] == "ok"
    assert_nothing_is_lost(again)


@pytest.mark.slow
def test_the_same_processes_pair_anew_after_their_stream_broke(start: Start) -> None:
    sender, receiver = start("sender"), start("receiver")
    pair = Pair(sender, receiver)
    pair.start(1, list(range(2000)), list(range(2000)), close=False)
    pair.credited.acquire()
    receiver.do("disconnect", peer="sender")
    sender.do("disconnect", peer="receiver")
    assert sender.wait("SendFinished", transfer_id=1)["outcome"] == "failed"
    assert receiver.wait("ReceiveFinished", transfer_id=1)["outcome"] == "failed"
    for endpoint in (sender, receiver):
        endpoint.events.clear()
    again = Pair(sender, receiver)
    again.start(2, list(range(500)), list(range(500, 1000)))
    assert receiver.wait("ReceiveFinished", transfer_id=2)["outcome"] == "ok"
    assert receiver.digest(list(range(500, 1000))) == sender.digest(list(range(500)))
    assert_nothing_is_lost(again)


@pytest.mark.slow
def test_transports_that_differ_are_refused_in_words(start: Start, request: pytest.FixtureRequest) -> None:
    other = "grpc" if "ucx" in request.node.name else "ucx"
    if other == "ucx":
        require_ucx()
    endpoint, stranger = start("sender"), Endpoint("stranger", other)
    try:
        endpoint.do("connect", peer="stranger", info=stranger.info, receive=False)
        assert "transport: stranger uses" in endpoint.wait("Connected", peer="stranger")["error"]
    finally:
        stranger.close()
