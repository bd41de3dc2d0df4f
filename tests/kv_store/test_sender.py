import pytest

from kv_store.layout import as_slots
from tests.kv_store.fakes import FakeClock, FakeNetwork, FakeWorker, pair, settle


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sender(clock: FakeClock) -> FakeWorker:
    return FakeWorker(FakeNetwork(), "sender", clock)


@pytest.fixture
def receiver(sender: FakeWorker, clock: FakeClock) -> FakeWorker:
    worker = FakeWorker(sender.transport._network, "receiver", clock)
    pair(sender, worker)
    return worker


def send(sender: FakeWorker, transfer_id: int, tokens: int, *, close: bool = True) -> None:
    machine = sender.machine.sender
    machine.open(transfer_id, "receiver", tokens, 0)
    machine.begin_chunk(transfer_id, transfer_id * 100, 0, as_slots(range(tokens)))
    machine.layers_ready([transfer_id * 100], 3, None, sender.machine.sender._clock())
    if close:
        machine.close(transfer_id)


def test_nothing_to_send_ends_at_once(sender: FakeWorker, receiver: FakeWorker) -> None:
    sender.machine.sender.open(1, "receiver", 9, 9)
    sender.machine.sender.close(1)
    [finished] = sender.sent()
    assert (finished.outcome, finished.messages, finished.bytes) == ("ok", 0, 0)


def test_the_exposed_tail_and_the_transfer_are_timed(
    sender: FakeWorker, receiver: FakeWorker, clock: FakeClock
) -> None:
    send(sender, 1, 4)
    clock.now += 1
    sender.machine.round()
    clock.now += 2
    settle(sender, receiver)
    [finished] = sender.sent()
    assert finished.compute_ended_ago == pytest.approx(3)
    assert finished.transfer_seconds == pytest.approx(2)


def test_without_credit_layers_wait_and_nothing_is_lost(sender: FakeWorker, receiver: FakeWorker) -> None:
    send(sender, 1, 16)
    sender.machine.round()
    granted = len(sender.transport._network.pending())
    assert 0 < granted < 12
    for write in sender.transport._network.pending():
        write.complete()
    sender.machine.round()
    assert sender.transport._network.pending() == []
    assert sender.sent() == []
    settle(sender, receiver)
    assert [event.outcome for event in sender.sent()] == ["ok"]


def test_an_abort_waits_for_the_write_under_way(sender: FakeWorker, receiver: FakeWorker) -> None:
    send(sender, 1, 4)
    sender.machine.round()
    sender.machine.sender.abort(1)
    sender.machine.sender.abort(1)
    sender.machine.round()
    assert sender.sent() == []
    for write in sender.transport._network.pending():
        write.complete()
    sender.machine.round()
    [finished] = sender.sent()
    assert finished.outcome == "aborted"


def test_an_abort_before_anything_was_sent_ends_at_once(sender: FakeWorker, receiver: FakeWorker) -> None:
    send(sender, 1, 4, close=False)
    sender.machine.sender.abort(1)
    assert [event.outcome for event in sender.sent()] == ["aborted"]
    sender.machine.sender.begin_chunk(1, 5, 4, as_slots([1]))
    sender.machine.sender.layers_ready([5, 100], 3, None, 0.0)
    sender.machine.sender.close(1)
    sender.machine.round()
    assert len(sender.sent()) == 1


def test_a_failed_write_loses_the_peer_and_all_its_sends(sender: FakeWorker, receiver: FakeWorker) -> None:
    send(sender, 1, 4)
    send(sender, 2, 4, close=False)
    sender.machine.round()
    sender.transport._network.pending()[0].fail()
    sender.machine.round()
    assert [(event.transfer_id, event.outcome) for event in sender.sent()] == [(1, "failed"), (2, "failed")]
    assert [event.peer for event in sender.lost()] == ["receiver"]
    for write in sender.transport._network.pending():
        write.fail()
    sender.machine.round()
    assert sender.machine.count().send_buffers_in_use == 0
    assert all(write.released for write in sender.transport._network.writes)


def test_a_peer_that_cannot_be_written_to_is_lost(sender: FakeWorker, receiver: FakeWorker) -> None:
    sender.transport.unreachable.add(receiver.transport.agent)
    send(sender, 1, 4)
    sender.machine.round()
    assert [event.outcome for event in sender.sent()] == ["failed"]
    assert [event.peer for event in sender.lost()] == ["receiver"]
    assert sender.machine.count().send_buffers_in_use == 0


def test_a_send_to_a_stranger_or_under_a_taken_id_fails(sender: FakeWorker, receiver: FakeWorker) -> None:
    sender.machine.sender.open(1, "nobody", 4, 0)
    send(sender, 2, 4, close=False)
    sender.machine.sender.open(2, "receiver", 4, 0)
    assert [(event.transfer_id, event.outcome) for event in sender.sent()] == [(1, "failed"), (2, "failed")]
    sender.machine.sender.close(2)
    settle(sender, receiver)
    assert sender.sent()[-1].outcome == "ok"


def test_a_send_that_is_closed_too_early_fails_instead_of_hanging(sender: FakeWorker, receiver: FakeWorker) -> None:
    sender.machine.sender.open(1, "receiver", 8, 0)
    sender.machine.sender.begin_chunk(1, 1, 0, as_slots(range(4)))
    sender.machine.sender.layers_ready([1], 3, None, 0.0)
    sender.machine.sender.close(1)
    settle(sender, receiver)
    [finished] = sender.sent()
    assert finished.outcome == "failed"
    assert "closed before" in finished.reason


def test_a_stuck_receiver_does_not_stop_sends_to_others(
    sender: FakeWorker, receiver: FakeWorker, clock: FakeClock
) -> None:
    other = FakeWorker(sender.transport._network, "other", clock)
    pair(sender, other)
    send(sender, 1, 16)
    sender.machine.round()
    stuck = sender.transport._network.pending()
    assert len(stuck) == 2
    sender.machine.sender.open(2, "other", 4, 0)
    sender.machine.sender.begin_chunk(2, 2, 0, as_slots(range(4)))
    sender.machine.sender.layers_ready([2], 3, None, 0.0)
    sender.machine.sender.close(2)
    for _ in range(3):
        sender.machine.round()
        for write in sender.transport._network.pending():
            if write not in stuck:
                write.complete()
        other.transport.deliver_all()
        other.machine.round()
        sender.machine.sender.add_credits("other", other.take_credits())
    sender.machine.round()
    assert [event.transfer_id for event in sender.sent()] == [2]
