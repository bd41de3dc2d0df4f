"""The transfer thread itself: what it promises to callers on other threads."""

import queue
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from kv_store.transfer.events import CreditsReady, ReceiveFinished, SendFinished, TransferEvent
from kv_store.transfer.worker import KVTransfer
from tests.kv_store.memory_network import MemoryNetwork


def make_transfer(
    network: MemoryNetwork,
    *,
    on_event: Callable[[TransferEvent], None],
    on_failure: Callable[[BaseException], None],
) -> KVTransfer:
    """One that is its own peer."""
    transfer = KVTransfer(
        transport=network.transport("agent/peer"),
        pages=torch.randn(1, 2, 4, 2, 1, 4),
        staging_slots=2,
        slot_bytes=64,
        send_buffers=1,
        incarnation="peer",
        checksum=True,
        on_event=on_event,
        on_failure=on_failure,
    )
    transfer.start()
    return transfer


class Side:
    """A KVTransfer and its events; credits go straight to the other side."""

    def __init__(self, network: MemoryNetwork, name: str, block_size: int) -> None:
        self.name = name
        self.pages = torch.randn(4, 2, 60, block_size, 2, 8)
        self.tokens = self.pages.view(4, 2, -1, 2, 8)
        self.events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self.other: Side | None = None
        self.failures: list[BaseException] = []
        self.transfer = KVTransfer(
            transport=network.transport(f"agent/{name}"),
            pages=self.pages,
            staging_slots=8,
            slot_bytes=4096,
            send_buffers=4,
            incarnation=name,
            checksum=True,
            on_event=self.on_event,
            on_failure=self.failures.append,
        )
        self.transfer.start()

    def on_event(self, event: TransferEvent) -> None:
        if isinstance(event, CreditsReady):
            assert self.other is not None
            self.other.transfer.add_credits(self.name, event.grants)
        else:
            self.events.put(event)

    def next_event(self) -> TransferEvent:
        return self.events.get(timeout=20)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    network = MemoryNetwork()
    sender, receiver = Side(network, "sender", 16), Side(network, "receiver", 9)
    sender.other, receiver.other = receiver, sender
    sender.transfer.connect("receiver", receiver.transfer.local_peer(), receive=False).result(20)
    receiver.transfer.connect("sender", sender.transfer.local_peer(), receive=True).result(20)
    yield sender, receiver
    sender.transfer.close()
    receiver.transfer.close()
    assert sender.failures == receiver.failures == []


def run_transfer(sender: Side, receiver: Side, number: int, slots: list[int]) -> None:
    receiver.transfer.open_receive(number, "sender", 0, slots)
    sender.transfer.open_send(number, "receiver", len(slots), 0)
    chunk = sender.transfer.begin_chunk(number, 0, slots)
    for layer in range(4):
        sender.transfer.layers_ready([chunk], layer + 1)
    sender.transfer.close_send(number)


def test_transfers_from_many_threads_all_land(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    ranges = {number: list(range(number * 40, number * 40 + 37)) for number in range(12)}
    threads = [
        threading.Thread(target=run_transfer, args=(sender, receiver, number, slots))
        for number, slots in ranges.items()
    ]
    for thread in threads:
        thread.start()
    for _ in ranges:
        event = sender.next_event()
        assert isinstance(event, SendFinished)
        assert event.outcome == "ok"
        receiver.transfer.seal(event.transfer_id, event.messages, event.bytes)
    for _ in ranges:
        landed = receiver.next_event()
        assert isinstance(landed, ReceiveFinished)
        assert landed.outcome == "ok"
        slots = ranges[landed.transfer_id]
        assert torch.equal(receiver.tokens[:, :, slots], sender.tokens[:, :, slots])
    for thread in threads:
        thread.join()


def test_closing_fails_what_is_open_and_refuses_what_comes_later(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    receiver.transfer.open_receive(1, "sender", 0, [1, 2])
    sender.transfer.open_send(2, "receiver", 2, 0)
    for side, kind in ((sender, SendFinished), (receiver, ReceiveFinished)):
        side.transfer.close()
        side.transfer.close()
        event = side.next_event()
        assert isinstance(event, kind)
        assert event.outcome == "failed"
    sender.transfer.layers_ready([0], 1)
    sender.transfer.abort_send(2)
    with pytest.raises(RuntimeError, match="ended"):
        sender.transfer.open_send(3, "receiver", 2, 0)
    with pytest.raises(RuntimeError, match="ended"):
        receiver.transfer.connect("sender", sender.transfer.local_peer(), receive=True)


def test_a_broken_invariant_ends_the_thread_loudly(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork()
    sender, receiver = Side(network, "sender", 16), Side(network, "receiver", 9)
    sender.transfer.connect("receiver", receiver.transfer.local_peer(), receive=False).result(20)
    sender.transfer.open_send(1, "receiver", 8, 0)
    sender.transfer.begin_chunk(1, 5, [1, 2])
    event = sender.next_event()
    assert isinstance(event, SendFinished)
    assert event.outcome == "failed"
    assert "expected at 0" in event.reason
    sender.transfer.close()
    receiver.transfer.close()
    [failure] = sender.failures
    assert isinstance(failure, AssertionError)
    assert receiver.failures == []
    assert "the transfer thread failed" in caplog.text
    with pytest.raises(RuntimeError, match="ended") as refused:
        sender.transfer.open_send(2, "receiver", 8, 0)
    assert refused.value.__cause__ is failure


def test_a_failure_is_told_once_and_after_the_open_transfers_have_failed() -> None:
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    transfer = make_transfer(MemoryNetwork(), on_event=told.put, on_failure=told.put)
    transfer.connect("peer", transfer.local_peer(), receive=True).result(20)
    transfer.open_receive(1, "peer", 0, [1])
    transfer.open_receive(1, "peer", 0, [1])
    while isinstance(event := told.get(timeout=20), CreditsReady):
        continue
    assert isinstance(event, ReceiveFinished)
    assert event.outcome == "failed"
    assert isinstance(told.get(timeout=20), AssertionError)
    transfer.close()
    assert told.empty()


def test_a_failure_is_told_even_if_the_transfers_cannot_be_ended_in_order(caplog: pytest.LogCaptureFixture) -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def refuse(event: TransferEvent) -> None:
        if isinstance(event, ReceiveFinished):
            raise ValueError(f"no place for transfer {event.transfer_id}")

    transfer = make_transfer(MemoryNetwork(), on_event=refuse, on_failure=failures.put)
    transfer.connect("peer", transfer.local_peer(), receive=True).result(20)
    for number in (1, 2):
        transfer.open_receive(number, "peer", 0, [number])
    transfer.abort_receive(1)
    assert "transfer 1" in str(failures.get(timeout=20))
    transfer.close()
    assert failures.empty()
    assert "not all open transfers could be failed" in caplog.text


def test_whether_a_peer_can_write_is_known_as_soon_as_it_is_paired(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    assert receiver.transfer.can_receive_from("sender")
    assert not receiver.transfer.can_receive_from("stranger")
    assert not sender.transfer.can_receive_from("receiver")
    receiver.transfer.close()
    assert not receiver.transfer.can_receive_from("sender")


def test_slots_outside_of_the_pages_are_the_callers_error(sides: tuple[Side, Side]) -> None:
    with pytest.raises(AssertionError, match="slots"):
        sides[1].transfer.open_receive(1, "sender", 0, [60 * 9])


def test_counters_can_be_read_at_any_time(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    run_transfer(sender, receiver, 1, [1, 2, 3])
    event = sender.next_event()
    assert isinstance(event, SendFinished)
    receiver.transfer.seal(1, event.messages, event.bytes)
    receiver.next_event()
    receiver.transfer.close()
    counters = receiver.transfer.counters()
    assert counters.messages_received == event.messages
    assert counters.bytes_received == event.bytes == 3 * 4 * 2 * 2 * 8 * 4
    assert counters.staging.total == 8
    assert set(counters.dropped) == {"duplicate", "late", "truncated", "foreign", "corrupt"}


def test_counters_are_true_when_the_thread_falls_asleep_for_good(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last peer has left and its slots come out of quarantine: nothing happens any more after that."""
    monkeypatch.setattr("kv_store.transfer.worker.COUNTERS_SECONDS", 1000.0)
    _, receiver = sides
    receiver.transfer.prove_dead("sender")
    for _ in range(200):
        if receiver.transfer.counters().staging.free == 8:
            break
        threading.Event().wait(0.05)
    assert receiver.transfer.counters().staging.free == 8
    assert receiver.transfer.counters().staging.quarantined == receiver.transfer.counters().peers == 0
