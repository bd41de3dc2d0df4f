"""Both real transports between real processes: UCX as it chooses, UCX over TCP alone as between hosts, and gRPC.

A process takes seconds to start, so one sender and one receiver serve all tests of their transport, paired anew for
each; only what is killed is a process of its own.
"""

import importlib
import itertools
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.kv_store.processes import Endpoint, Pair

pytestmark = pytest.mark.slow

TRANSPORTS = ["ucx", "ucx:tcp,self", "grpc"]
#: Of the senders' pages, and of the receivers', whose blocks are smaller.
TOKENS = 300 * 16
RECEIVER_SHAPE = [6, 700, 7, 2, 8]
SLOTS = 8
Start = Callable[[str], Endpoint]


def require_ucx() -> None:
    """On Linux the install brings nixl: not to find what the product would find is a failure there, never a skip."""
    try:
        importlib.import_module("kv_store.transport.ucx")
    except (ImportError, OSError, RuntimeError) as error:
        if sys.platform == "linux":
            pytest.fail(f"UCX cannot be tested: {error!r}")
        pytest.skip(f"no UCX on {sys.platform}: {error!r}")


def close(endpoint: Endpoint) -> None:
    if endpoint.process.poll() is None:
        endpoint.process.send_signal(signal.SIGCONT)
    status = endpoint.close()
    assert status in (0, -signal.SIGKILL), f"{endpoint.name} ended with {status}"


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("ucx"):
        require_ucx()
    return str(request.param)


@pytest.fixture(scope="module")
def sender(transport: str) -> Iterator[Endpoint]:
    endpoint = Endpoint("sender", transport)
    yield endpoint
    close(endpoint)


@pytest.fixture(scope="module")
def receiver(transport: str) -> Iterator[Endpoint]:
    endpoint = Endpoint("receiver", transport, seed=2, shape=RECEIVER_SHAPE)
    yield endpoint
    close(endpoint)


@pytest.fixture
def start(transport: str) -> Iterator[Start]:
    """Starts an endpoint that ends with the test."""
    endpoints: list[Endpoint] = []

    def start_one(name: str) -> Endpoint:
        endpoints.append(Endpoint(name, transport))
        return endpoints[-1]

    yield start_one
    for endpoint in endpoints:
        close(endpoint)


@pytest.fixture(scope="module")
def strangers() -> Mapping[str, str]:
    """What a worker on each kind of transport says of itself."""
    require_ucx()
    endpoints = {kind: Endpoint("stranger", kind) for kind in ("ucx", "grpc")}
    infos = {kind: endpoint.info for kind, endpoint in endpoints.items()}
    for endpoint in endpoints.values():
        close(endpoint)
    return infos


@pytest.fixture(scope="module")
def number() -> Callable[[], int]:
    """Ids that no transfer had."""
    return itertools.count(1).__next__


@contextmanager
def paired(sender: Endpoint, receiver: Endpoint) -> Iterator[Pair]:
    """Connected for as long as the block runs, as if they never had been."""
    yield Pair(sender, receiver)
    for endpoint, peer in ((sender, receiver), (receiver, sender)):
        if endpoint.process.poll() is None:
            endpoint.do("disconnect", peer=peer.name)
            endpoint.wait_for_counters(lambda c: c["peers"] == 0)


@pytest.fixture
def pair(sender: Endpoint, receiver: Endpoint) -> Iterator[Pair]:
    with paired(sender, receiver) as pair:
        yield pair


def assert_nothing_is_lost(pair: Pair) -> None:
    counters = pair.receiver.wait_for_counters(lambda c: c["open_receives"] == 0)
    assert counters["failure"] == "None"
    assert counters["staging"]["quarantined"] == 0
    assert counters["staging"]["free"] + counters["staging"]["granted"] == SLOTS
    sender = pair.sender.wait_for_counters(lambda c: c["open_sends"] == 0)
    assert (sender["writes_in_flight"], sender["send_buffers_in_use"], sender["failure"]) == (0, 0, "None")


def assert_a_transfer_lands_whole(pair: Pair, transfer_id: int) -> None:
    source, target = list(range(500)), list(range(500, 1000))
    pair.start(transfer_id, source, target)
    assert pair.receiver.wait("ReceiveFinished", transfer_id=transfer_id)["outcome"] == "ok"
    assert pair.receiver.digest(target) == pair.sender.digest(source)
    assert_nothing_is_lost(pair)


def test_twenty_transfers_at_once_land_whole(pair: Pair, number: Callable[[], int]) -> None:
    before = pair.receiver.counters()
    rng = random.Random(0)
    sources = {number(): rng.sample(range(TOKENS), rng.choice([1, 15, 16, 17, 130, 300])) for _ in range(20)}
    free = rng.sample(range(700 * 7), 700 * 7)
    targets = {transfer: [free.pop() for _ in source] for transfer, source in sources.items()}
    for transfer, source in sources.items():
        pair.start(
            transfer, source, targets[transfer], chunk=rng.choice([16, 100]), layer_seconds=rng.choice([0, 0.002])
        )
    for transfer, source in sources.items():
        finished = pair.receiver.wait("ReceiveFinished", transfer_id=transfer)
        assert finished["outcome"] == "ok", finished
        assert pair.receiver.digest(targets[transfer]) == pair.sender.digest(source)
    assert_nothing_is_lost(pair)
    counters = pair.receiver.counters()
    received = counters["bytes_received"] - before["bytes_received"]
    assert received == sum(map(len, sources.values())) * 6 * 2 * 2 * 8 * 4
    assert counters["dropped"] == before["dropped"]


@pytest.mark.parametrize("who", ["sender", "receiver", "both"])
def test_aborts_midway_free_both_sides_and_later_transfers_work(
    pair: Pair, number: Callable[[], int], who: str
) -> None:
    slots, transfer = list(range(1000)), number()
    pair.start(transfer, slots, slots, close=False)
    pair.credited.acquire()
    if who != "sender":
        pair.receiver.do("abort_receive", transfer_id=transfer)
        assert pair.receiver.wait("ReceiveFinished", transfer_id=transfer)["outcome"] == "aborted"
    pair.sender.do("abort_send", transfer_id=transfer)
    assert pair.sender.wait("SendFinished", transfer_id=transfer)["outcome"] == "aborted"
    pair.receiver.do("abort_receive", transfer_id=transfer)
    assert pair.receiver.wait("ReceiveFinished", transfer_id=transfer)["outcome"] == "aborted"
    assert_a_transfer_lands_whole(pair, number())


def test_a_receiver_that_is_killed_in_mid_write_fails_its_sends(
    sender: Endpoint, receiver: Endpoint, start: Start, number: Callable[[], int]
) -> None:
    victim = start("victim-receiver")
    with paired(sender, victim) as pair:
        assert_a_transfer_lands_whole(pair, number())
        victim.process.send_signal(signal.SIGSTOP)
        transfer = number()
        sender.do("send", transfer_id=transfer, peer=victim.name, slots=list(range(2000)), chunk=500)
        sender.wait_for_counters(lambda c: c["writes_in_flight"] > 0)
        victim.kill()
        assert sender.wait("SendFinished", transfer_id=transfer)["outcome"] == "failed"
        sender.wait("PeerLost", peer=victim.name)
        counters = sender.wait_for_counters(lambda c: c["writes_in_flight"] == 0)
        assert (counters["peers"], counters["send_buffers_in_use"], counters["failure"]) == (0, 0, "None")
    with paired(sender, receiver) as again:
        assert_a_transfer_lands_whole(again, number())


def test_a_sender_that_is_killed_leaves_no_slot_behind(
    sender: Endpoint, receiver: Endpoint, start: Start, number: Callable[[], int]
) -> None:
    # Until the lasting sender is paired again, some slots may be kept for what it still writes.
    kept = receiver.counters()["staging"]["quarantined"]
    victim = start("victim-sender")
    with paired(victim, receiver) as pair:
        transfer = number()
        pair.start(transfer, list(range(3000)), list(range(3000)), layer_seconds=0.001, close=False)
        pair.credited.acquire()
        victim.kill()
        receiver.do("disconnect", peer=victim.name)
        assert receiver.wait("ReceiveFinished", transfer_id=transfer)["outcome"] == "failed"
        receiver.wait_for_counters(lambda c: c["staging"]["free"] == SLOTS - kept)
    with paired(sender, receiver) as again:
        assert_a_transfer_lands_whole(again, number())


def test_the_same_processes_pair_anew_after_their_stream_broke(
    sender: Endpoint, receiver: Endpoint, number: Callable[[], int]
) -> None:
    transfer = number()
    with paired(sender, receiver) as pair:
        pair.start(transfer, list(range(2000)), list(range(2000)), close=False)
        pair.credited.acquire()
    assert sender.wait("SendFinished", transfer_id=transfer)["outcome"] == "failed"
    assert receiver.wait("ReceiveFinished", transfer_id=transfer)["outcome"] == "failed"
    with paired(sender, receiver) as again:
        assert_a_transfer_lands_whole(again, number())


def test_transports_that_differ_are_refused_in_words(
    sender: Endpoint, transport: str, strangers: Mapping[str, str]
) -> None:
    other = "grpc" if transport.startswith("ucx") else "ucx"
    sender.do("connect", peer="stranger", info=strangers[other], receive=False)
    assert "transport: stranger uses" in sender.wait("Connected", peer="stranger")["error"]
