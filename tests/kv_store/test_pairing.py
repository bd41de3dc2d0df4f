"""What becomes of slots, writes and transfers when a peer goes away, and when it comes back."""

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from kv_store.layout import as_slots
from kv_store.process import ProcessId
from kv_store.transfer.pairing import DRAIN_SECONDS, GRACE_SECONDS, PROOF_INTERVAL_SECONDS
from kv_store.transport.base import PeerUnreachable
from tests.kv_store.fakes import FakeClock, FakeNetwork, FakeWorker, pair, settle
from tests.kv_store.test_sender import send


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def two_workers(clock: FakeClock, *, revokes: bool = False) -> tuple[FakeWorker, FakeWorker]:
    network = FakeNetwork(revokes=revokes)
    sender, receiver = FakeWorker(network, "sender", clock), FakeWorker(network, "receiver", clock)
    pair(sender, receiver)
    return sender, receiver


def test_without_proof_slots_stay_in_quarantine_and_receives_fail(clock: FakeClock) -> None:
    _, receiver = two_workers(clock)
    receiver.machine.receiver.open(1, "sender", 0, as_slots(range(4)))
    receiver.machine.round()
    held = receiver.machine.count().staging.granted
    receiver.machine.pairing.disconnect("sender", "closed")
    assert [event.outcome for event in receiver.received()] == ["failed"]
    clock.now += 100
    receiver.machine.round()
    counts = receiver.machine.count().staging
    assert (counts.quarantined, counts.granted, counts.total) == (held, 0, 8)
    assert receiver.machine.is_paired


def test_a_word_that_the_peer_is_dead_frees_its_slots_after_a_grace(clock: FakeClock) -> None:
    _, receiver = two_workers(clock)
    receiver.machine.pairing.disconnect("sender", "closed")
    receiver.machine.pairing.prove_dead("sender")
    receiver.machine.round()
    assert receiver.machine.count().staging.quarantined == 2
    assert receiver.machine.wants_polling
    clock.now += GRACE_SECONDS
    receiver.machine.round()
    assert receiver.machine.count().staging.free == 8
    assert not receiver.machine.is_paired


def test_the_word_may_come_before_the_stream_closes(clock: FakeClock) -> None:
    _, receiver = two_workers(clock)
    receiver.machine.receiver.open(1, "sender", 0, as_slots(range(4)))
    receiver.machine.pairing.prove_dead("sender")
    receiver.machine.pairing.disconnect("sender", "closed")
    assert [event.outcome for event in receiver.received()] == ["failed"]
    clock.now += GRACE_SECONDS
    receiver.machine.round()
    assert receiver.machine.count().staging.free == 8


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_death_of_a_process_on_this_host_is_noticed(clock: FakeClock) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    network = FakeNetwork()
    receiver = FakeWorker(network, "receiver", clock)
    info = FakeWorker(network, "sender", clock).machine.local_peer()
    assert (info.host_id, info.pid, info.process_start) == (
        ProcessId.own().host_id,
        os.getpid(),
        ProcessId.own().start,
    )
    info.pid, info.process_start = child.pid, start
    paired: Future[None] = Future()
    receiver.machine.pairing.connect("sender", info, True, paired)
    receiver.machine.round()
    receiver.machine.pairing.disconnect("sender", "closed")
    receiver.machine.round()
    assert receiver.machine.count().staging.quarantined == 2
    child.kill()
    child.communicate()
    for seconds in (PROOF_INTERVAL_SECONDS, GRACE_SECONDS):
        clock.now += seconds
        receiver.machine.round()
    assert receiver.machine.count().staging.free == 8


def test_a_transport_that_revokes_needs_no_proof(clock: FakeClock) -> None:
    _, receiver = two_workers(clock, revokes=True)
    receiver.machine.pairing.disconnect("sender", "closed")
    assert receiver.machine.count().staging.free == 8


def test_a_late_message_frees_its_quarantined_slot_and_touches_nothing(clock: FakeClock) -> None:
    sender, receiver = two_workers(clock)
    receiver.machine.receiver.open(1, "sender", 0, as_slots(range(4)))
    send(sender, 1, 4)
    sender.machine.round()
    receiver.machine.pairing.disconnect("sender", "closed")
    quarantined = receiver.machine.count().staging.quarantined
    before = receiver.pages.clone()
    sender.transport._network.pending()[0].complete()
    receiver.transport.deliver_all()
    receiver.machine.round()
    assert receiver.machine.count().staging.quarantined == quarantined - 1
    assert receiver.machine.count().dropped["late"] == 1
    assert receiver.pages.equal(before)


@pytest.mark.parametrize("revokes", [False, True])
@pytest.mark.parametrize("parts_first", [False, True])
def test_a_peer_is_paired_anew_with_writes_in_flight(clock: FakeClock, revokes: bool, parts_first: bool) -> None:
    """No round comes between the commands, as when a worker's thread finds them all at once."""
    sender, receiver = two_workers(clock, revokes=revokes)
    receiver.machine.receiver.open(1, "sender", 0, as_slots(range(4)))
    send(sender, 1, 4)
    sender.machine.round()
    if parts_first:
        sender.machine.pairing.disconnect("receiver", "closed")
    again = [sender.connect(receiver, receive=False) for _ in range(2)]
    assert [event.outcome for event in sender.sent()] == ["failed"]
    for write in sender.transport._network.pending():
        write.complete()
    sender.machine.round()
    for future in again:
        future.result(0)
    assert sender.machine.count().send_buffers_in_use == sender.machine.count().writes_in_flight == 0
    receiver.connect(sender, receive=True).result(0)
    settle(sender, receiver)
    assert [event.outcome for event in receiver.received()] == ["failed"]
    receiver.machine.receiver.open(2, "sender", 0, as_slots(range(4)))
    send(sender, 2, 4)
    settle(sender, receiver)
    assert sender.sent()[-1].outcome == "ok"


def test_slots_of_a_peer_on_another_host_are_counted_apart(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    network = FakeNetwork()
    receiver = FakeWorker(network, "receiver", clock)
    for name, host in [("near", ProcessId.own().host_id), ("far", "elsewhere")]:
        info = FakeWorker(network, name, clock).machine.local_peer()
        info.host_id = host
        receiver.machine.pairing.connect(name, info, True, Future())
    receiver.machine.round()
    for name in ("near", "far"):
        receiver.machine.pairing.disconnect(name, "closed")
    counts = receiver.machine.count()
    assert (counts.staging.quarantined, counts.quarantined_out_of_sight) == (4, 2)
    assert "until far is provably gone, which cannot be seen" in caplog.text
    assert "near" not in caplog.text
    receiver.machine.pairing.prove_dead("far")
    receiver.machine.round()
    clock.now += GRACE_SECONDS
    receiver.machine.round()
    assert receiver.machine.count().quarantined_out_of_sight == 0


def test_a_peer_for_which_no_slot_is_left_is_known(clock: FakeClock) -> None:
    network = FakeNetwork()
    receiver = FakeWorker(network, "receiver", clock)
    for number in range(4):
        stranger = FakeWorker(network, f"lost-{number}", clock)
        receiver.connect(stranger, receive=True).result(0)
        assert receiver.machine.receiver.writers == {stranger.name}
        receiver.machine.round()
        assert receiver.machine.receiver.writers == {stranger.name}
        receiver.machine.pairing.disconnect(stranger.name, "closed")
        assert not receiver.machine.receiver.writers
    newcomer = FakeWorker(network, "newcomer", clock)
    receiver.connect(newcomer, receive=True).result(0)
    assert "newcomer" not in receiver.machine.receiver.writers
    receiver.machine.round()
    assert "newcomer" not in receiver.machine.receiver.writers
    receiver.machine.pairing.prove_dead("lost-0")
    receiver.machine.round()
    clock.now += GRACE_SECONDS
    receiver.machine.round()
    assert receiver.machine.receiver.writers == {"newcomer"}
    assert len(receiver.take_credits()) > 0


def test_a_sender_pairs_anew_only_when_its_writes_have_ended(clock: FakeClock) -> None:
    sender, receiver = two_workers(clock)
    send(sender, 1, 4)
    sender.machine.round()
    sender.machine.pairing.disconnect("receiver", "closed")
    assert [event.outcome for event in sender.sent()] == ["failed"]
    again = sender.connect(receiver, receive=False)
    sender.machine.round()
    assert not again.done()
    for write in sender.transport._network.pending():
        write.complete()
    sender.machine.round()
    again.result(0)
    receiver.machine.pairing.disconnect("sender", "closed")
    receiver.connect(sender, receive=True).result(0)
    settle(sender, receiver)
    assert receiver.machine.count().staging.quarantined == 0
    receiver.machine.receiver.open(2, "sender", 0, as_slots(range(4)))
    send(sender, 2, 4)
    settle(sender, receiver)
    assert sender.sent()[-1].outcome == "ok"


def test_after_a_failed_write_the_same_incarnation_is_refused(clock: FakeClock) -> None:
    sender, receiver = two_workers(clock)
    send(sender, 1, 4)
    sender.machine.round()
    for write in sender.transport._network.pending():
        write.fail()
    sender.machine.round()
    with pytest.raises(PeerUnreachable, match="next incarnation"):
        sender.connect(receiver, receive=False).result(0)
    successor = FakeWorker(sender.transport._network, "receiver-2", clock)
    pair(sender, successor)
    assert sender.machine.count().peers == 1


def test_writes_that_do_not_end_are_cut_off(clock: FakeClock) -> None:
    sender, receiver = two_workers(clock)
    send(sender, 1, 4)
    sender.machine.round()
    sender.machine.pairing.disconnect("receiver", "closed")
    assert receiver.transport.agent in sender.transport.peers
    clock.now += DRAIN_SECONDS + 1
    sender.machine.round()
    assert receiver.transport.agent not in sender.transport.peers


def test_a_connection_is_cut_once_however_long_its_writes_take(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sender, _ = two_workers(clock)
    send(sender, 1, 4)
    sender.machine.round()
    sender.machine.pairing.disconnect("receiver", "closed")
    cuts: list[str] = []
    monkeypatch.setattr(sender.transport, "disconnect", cuts.append)
    clock.now += DRAIN_SECONDS + 1
    for _ in range(5):
        sender.machine.round()
        clock.now += 1
    for write in sender.transport._network.pending():
        write.fail()
    sender.machine.round()
    sender.machine.round()
    assert cuts == ["agent/receiver"]
    assert caplog.text.count("cutting the connection") == 1
    assert not sender.machine.pairing.wants_polling


def test_a_connect_that_waits_fails_with_a_disconnect(clock: FakeClock) -> None:
    sender, receiver = two_workers(clock)
    send(sender, 1, 4)
    sender.machine.round()
    again = sender.connect(receiver, receive=False)
    assert not again.done()
    sender.machine.pairing.disconnect("receiver", "closed")
    with pytest.raises(PeerUnreachable, match="closed"):
        again.result(0)


def test_transports_that_do_not_fit_are_named(clock: FakeClock) -> None:
    network = FakeNetwork()
    sender, receiver = FakeWorker(network, "sender", clock), FakeWorker(network, "receiver", clock)
    info = receiver.machine.local_peer()
    for field, value, words in [("transport", "grpc", "transport: .*'grpc'"), ("slot_bytes", 8, "slot_bytes: 8")]:
        wrong = type(info)()
        wrong.CopyFrom(info)
        setattr(wrong, field, value)
        paired: Future[None] = Future()
        sender.machine.pairing.connect("receiver", wrong, False, paired)
        with pytest.raises(ValueError, match=words):
            paired.result(0)
    assert sender.machine.count().peers == 0


def test_an_unreachable_peer_fails_the_future(clock: FakeClock) -> None:
    network = FakeNetwork()
    sender, receiver = FakeWorker(network, "sender", clock), FakeWorker(network, "receiver", clock)
    sender.transport.unreachable.add(receiver.transport.agent)
    with pytest.raises(PeerUnreachable):
        sender.connect(receiver, receive=False).result(0)
