"""What the receiver makes of messages that are not what they should be."""

from collections.abc import Callable

import pytest
import torch

from common.pb.tandem.v1.transport_pb2 import KvHeader
from kv_store.layout import as_slots
from kv_store.staging import SlotGrant
from kv_store.transport.base import Notification
from tests.kv_store.fakes import FakeClock, FakeNetwork, FakeWorker, pair, settle

TOKENS = 4


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sender(clock: FakeClock) -> FakeWorker:
    return FakeWorker(FakeNetwork(), "sender", clock)


@pytest.fixture
def receiver(sender: FakeWorker, clock: FakeClock) -> FakeWorker:
    worker = FakeWorker(sender.transport._network, "receiver", clock, block_size=3)
    pair(sender, worker)
    return worker


def run_until_first_message(sender: FakeWorker, receiver: FakeWorker, transfer_id: int = 7) -> Notification:
    """Send one whole prompt; all messages but the first are delivered, that one is returned."""
    receiver.machine.receiver.open(transfer_id, "sender", 0, as_slots(range(TOKENS)))
    sender.machine.sender.open(transfer_id, "receiver", TOKENS, 0)
    sender.machine.sender.begin_chunk(transfer_id, transfer_id * 100, 0, as_slots(range(TOKENS)))
    sender.machine.sender.layers_ready([transfer_id * 100], 3, None, 0.0)
    sender.machine.sender.close(transfer_id)
    sender.machine.round()
    for write in sender.transport._network.pending():
        write.complete()
    first = receiver.transport.arriving.pop(0)
    settle(sender, receiver)
    return first


def deliver(worker: FakeWorker, notification: Notification, **changes: object) -> None:
    header = KvHeader.FromString(notification.payload)
    for name, value in changes.items():
        setattr(header, name, value)
    worker.transport.inbox.append(Notification(notification.peer, header.SerializeToString()))
    worker.machine.round()


def dropped(receiver: FakeWorker) -> dict[str, int]:
    return {name: count for name, count in receiver.machine.count().dropped.items() if count}


def seal(sender: FakeWorker, receiver: FakeWorker) -> None:
    finished = sender.sent()[-1]
    receiver.machine.receiver.seal(finished.transfer_id, finished.messages, finished.bytes)


def test_a_whole_transfer_lands_in_other_slots_and_blocks(sender: FakeWorker, receiver: FakeWorker) -> None:
    deliver(receiver, run_until_first_message(sender, receiver))
    seal(sender, receiver)
    [finished] = receiver.received()
    assert finished.outcome == "ok"
    assert finished.messages == sender.sent()[0].messages == 3
    assert torch.equal(receiver.tokens[:, :, :TOKENS], sender.tokens[:, :, :TOKENS])
    assert dropped(receiver) == {}


def assert_no_slot_is_lost(sender: FakeWorker, receiver: FakeWorker) -> None:
    counts = receiver.machine.count().staging
    credits = sender.machine.sender._lanes["receiver"].credits
    assert (counts.granted, counts.quarantined, counts.total) == (len(credits), 0, 8)


UNUSABLE: list[tuple[str, dict[str, object]]] = [
    ("corrupt", {"checksum": 1}),
    ("corrupt", {"region": "weights"}),
    ("corrupt", {"first_layer": 3}),
    ("corrupt", {"num_layers": 0}),
    ("corrupt", {"num_layers": 2**32 - 1}),
    ("corrupt", {"first_token": TOKENS}),
    ("corrupt", {"num_tokens": 0}),
    ("corrupt", {"num_tokens": 2**32 - 1}),
    ("corrupt", {"first_head": 1}),
    ("corrupt", {"num_heads": 1}),
    ("truncated", {"byte_count": 8}),
    ("truncated", {"byte_count": 2**32 - 1}),
]


@pytest.mark.parametrize(("reason", "changes"), UNUSABLE)
def test_an_unusable_message_fails_its_transfer_at_once_and_its_slot_goes_round(
    sender: FakeWorker, receiver: FakeWorker, reason: str, changes: dict[str, object]
) -> None:
    message = run_until_first_message(sender, receiver)
    before = receiver.pages.clone()
    deliver(receiver, message, **changes)
    [finished] = receiver.received()
    assert finished.outcome == "failed"
    assert reason in finished.reason
    assert dropped(receiver) == {reason: 1}
    assert torch.equal(receiver.pages, before)
    settle(sender, receiver)
    assert_no_slot_is_lost(sender, receiver)


STRANGE: list[tuple[str, dict[str, object]]] = [
    ("foreign", {"sender": "stranger"}),
    ("foreign", {"receiver": "former incarnation"}),
    ("foreign", {"generation": 99}),
    ("foreign", {"generation": 0}),
    ("foreign", {"slot": 99}),
    ("late", {"transfer_id": 8}),
]


@pytest.mark.parametrize(("reason", "changes"), STRANGE)
def test_a_strange_message_harms_nobody(
    sender: FakeWorker, receiver: FakeWorker, reason: str, changes: dict[str, object]
) -> None:
    message = run_until_first_message(sender, receiver)
    before = receiver.pages.clone()
    deliver(receiver, message, **changes)
    assert dropped(receiver) == {reason: 1}
    assert torch.equal(receiver.pages, before)
    assert receiver.received() == []
    assert receiver.machine.count().open_receives == 1


def test_what_is_no_header_is_dropped(sender: FakeWorker, receiver: FakeWorker) -> None:
    receiver.transport.inbox.append(Notification("agent/sender", b"\xff\xff\xff"))
    receiver.machine.round()
    assert dropped(receiver) == {"corrupt": 1}


def test_a_message_of_an_unknown_agent_is_foreign(sender: FakeWorker, receiver: FakeWorker) -> None:
    message = run_until_first_message(sender, receiver)
    deliver(receiver, Notification("agent/stranger", message.payload))
    assert dropped(receiver) == {"foreign": 1}


def test_a_duplicate_is_dropped_and_the_transfer_ends_well(sender: FakeWorker, receiver: FakeWorker) -> None:
    message = run_until_first_message(sender, receiver)
    deliver(receiver, message)
    deliver(receiver, message)
    seal(sender, receiver)
    assert [event.outcome for event in receiver.received()] == ["ok"]
    assert sum(dropped(receiver).values()) == 1


def test_the_same_part_under_a_fresh_grant_is_a_duplicate(sender: FakeWorker, receiver: FakeWorker) -> None:
    message = run_until_first_message(sender, receiver)
    deliver(receiver, message)
    grant = spare_grant(sender)
    deliver(receiver, message, slot=grant.slot, generation=grant.generation)
    assert dropped(receiver) == {"duplicate": 1}
    seal(sender, receiver)
    assert [event.outcome for event in receiver.received()] == ["ok"]


def spare_grant(sender: FakeWorker) -> SlotGrant:
    return sender.machine.sender._lanes["receiver"].credits.pop()


def test_a_message_under_an_old_generation_is_late(sender: FakeWorker, receiver: FakeWorker) -> None:
    old = run_until_first_message(sender, receiver)
    deliver(receiver, old)
    seal(sender, receiver)
    slot = KvHeader.FromString(old.payload).slot
    regranted = receiver.take_credits() + receiver.machine.receiver._pool.grant("sender", 8)
    assert slot in [grant.slot for grant in regranted]
    before = receiver.pages.clone()
    deliver(receiver, old)
    assert dropped(receiver) == {"late": 1}
    assert torch.equal(receiver.pages, before)


def test_after_an_abort_messages_are_dropped_and_their_slots_go_round(sender: FakeWorker, receiver: FakeWorker) -> None:
    message = run_until_first_message(sender, receiver)
    receiver.machine.receiver.abort(7)
    [finished] = receiver.received()
    assert finished.outcome == "aborted"
    before = receiver.pages.clone()
    deliver(receiver, message)
    assert torch.equal(receiver.pages, before)
    assert dropped(receiver) == {"late": 1}
    settle(sender, receiver)
    assert_no_slot_is_lost(sender, receiver)


def test_a_seal_waits_for_messages_that_are_on_their_way(sender: FakeWorker, receiver: FakeWorker) -> None:
    message = run_until_first_message(sender, receiver)
    seal(sender, receiver)
    assert receiver.received() == []
    deliver(receiver, message)
    [finished] = receiver.received()
    assert finished.outcome == "ok"


def test_a_sealed_receive_whose_message_never_comes_fails(
    sender: FakeWorker, receiver: FakeWorker, clock: FakeClock
) -> None:
    run_until_first_message(sender, receiver)
    seal(sender, receiver)
    clock.now += 9.9
    receiver.machine.round()
    assert receiver.received() == []
    clock.now += 0.2
    receiver.machine.round()
    [finished] = receiver.received()
    assert finished.outcome == "failed"
    assert "(3, " in finished.reason


@pytest.mark.parametrize("change", [lambda m, b: (m + 1, b), lambda m, b: (m - 1, b), lambda m, b: (m, b + 1)])
def test_a_seal_that_contradicts_what_landed_fails(
    sender: FakeWorker, receiver: FakeWorker, change: Callable[[int, int], tuple[int, int]]
) -> None:
    deliver(receiver, run_until_first_message(sender, receiver))
    finished = sender.sent()[0]
    receiver.machine.receiver.seal(7, *change(finished.messages, finished.bytes))
    assert [event.outcome for event in receiver.received()] == ["failed"]


def test_a_receive_of_nothing_needs_only_the_seal(sender: FakeWorker, receiver: FakeWorker) -> None:
    receiver.machine.receiver.open(1, "sender", 12, as_slots([]))
    receiver.machine.receiver.seal(1, 0, 0)
    assert [event.outcome for event in receiver.received()] == ["ok"]


def test_a_receive_from_a_stranger_fails_at_once(receiver: FakeWorker) -> None:
    receiver.machine.receiver.open(1, "nobody", 0, as_slots([1]))
    assert [event.outcome for event in receiver.received()] == ["failed"]


def test_a_peer_cannot_write_into_the_transfer_of_another(
    sender: FakeWorker, receiver: FakeWorker, clock: FakeClock
) -> None:
    message = run_until_first_message(sender, receiver)
    intruder = FakeWorker(sender.transport._network, "intruder", clock)
    receiver.connect(intruder, receive=True).result(0)
    receiver.machine.round()
    grant = receiver.take_credits()[0]
    before = receiver.pages.clone()
    stolen = Notification("agent/intruder", message.payload)
    deliver(receiver, stolen, sender="intruder", slot=grant.slot, generation=grant.generation)
    assert dropped(receiver) == {"late": 1}
    assert torch.equal(receiver.pages, before)
    deliver(receiver, message)
    seal(sender, receiver)
    assert [event.outcome for event in receiver.received()] == ["ok"]
