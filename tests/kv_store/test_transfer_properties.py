"""Any interleaving of computing, writing, arriving, aborting and forging keeps the promises of both machines."""

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.pb.tandem.v1.transport_pb2 import KvHeader
from kv_store.layout import as_slots
from kv_store.transport.base import Notification
from tests.kv_store.fakes import FakeClock, FakeNetwork, FakeWorker, pair, settle

LAYERS = 3


class Transfer:
    """What the test knows of one transfer."""

    def __init__(self, number: int, tokens: int, first_token: int, source: list[int], target: list[int]) -> None:
        self.number = number
        self.tokens = tokens
        self.first_token = first_token
        self.source = source
        self.target = target
        self.begun = first_token
        #: Chunk ids and how many of their layers are ready.
        self.chunks: dict[int, int] = {}
        self.closed = self.aborted = self.sealed = False

    @property
    def computed(self) -> bool:
        return self.begun == self.tokens and all(ready == LAYERS for ready in self.chunks.values())


class TransferMachineTest(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.network = FakeNetwork()
        self.sender = FakeWorker(self.network, "sender", self.clock, block_size=4, blocks=64, buffers=3)
        self.receiver = FakeWorker(self.network, "receiver", self.clock, block_size=3, blocks=200)
        pair(self.sender, self.receiver)
        self.transfers: list[Transfer] = []
        self.next_chunk = 0
        self.next_target = 0
        self.forged = False
        #: Pages of finished receives, which nobody may touch any more.
        self.settled: dict[int, torch.Tensor] = {}

    def live(self) -> list[Transfer]:
        return [t for t in self.transfers if not t.closed and not t.aborted]

    @rule(length=st.integers(0, 14), skip=st.integers(0, 5), seed=st.integers(0, 1000))
    @precondition(lambda self: len(self.transfers) < 6)
    def open(self, length: int, skip: int, seed: int) -> None:
        number = len(self.transfers) + 1
        source = np.random.default_rng(seed).permutation(self.sender.tokens.shape[2])[:length].tolist()
        target = list(range(self.next_target, self.next_target + length))
        self.next_target += length
        self.transfers.append(Transfer(number, skip + length, skip, source, target))
        self.receiver.machine.receiver.open(number, "sender", skip, as_slots(target))
        self.sender.machine.sender.open(number, "receiver", skip + length, skip)

    @rule(data=st.data())
    @precondition(lambda self: any(t.begun < t.tokens for t in self.live()))
    def begin_chunk(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from([t for t in self.live() if t.begun < t.tokens]))
        length = data.draw(st.integers(1, transfer.tokens - transfer.begun))
        start = transfer.begun - transfer.first_token
        self.next_chunk += 1
        self.sender.machine.sender.begin_chunk(
            transfer.number, self.next_chunk, transfer.begun, as_slots(transfer.source[start : start + length])
        )
        transfer.begun += length
        transfer.chunks[self.next_chunk] = 0

    @rule(data=st.data())
    @precondition(lambda self: any(ready < LAYERS for t in self.live() for ready in t.chunks.values()))
    def compute(self, data: st.DataObject) -> None:
        waiting = [(t, c) for t in self.live() for c, ready in t.chunks.items() if ready < LAYERS]
        transfer, chunk = data.draw(st.sampled_from(waiting))
        transfer.chunks[chunk] = data.draw(st.integers(transfer.chunks[chunk] + 1, LAYERS))
        self.sender.machine.sender.layers_ready([chunk], transfer.chunks[chunk], None, self.clock.now)

    @rule()
    def close_what_is_computed(self) -> None:
        for transfer in self.live():
            if transfer.computed:
                transfer.closed = True
                self.sender.machine.sender.close(transfer.number)

    @rule()
    def run_sender(self) -> None:
        self.sender.machine.round()

    @rule()
    def run_receiver(self) -> None:
        self.receiver.machine.round()
        self.sender.machine.sender.add_credits("receiver", self.receiver.take_credits())

    @rule(data=st.data())
    @precondition(lambda self: self.network.pending())
    def write_ends(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.network.pending())).complete()

    @rule(data=st.data(), again=st.booleans())
    @precondition(lambda self: self.receiver.transport.arriving)
    def message_arrives(self, data: st.DataObject, again: bool) -> None:
        arriving = self.receiver.transport.arriving
        notification = arriving.pop(data.draw(st.integers(0, len(arriving) - 1)))
        self.receiver.transport.inbox += [notification] * (1 + again)

    @rule(data=st.data())
    @precondition(lambda self: self.receiver.transport.arriving)
    def forged_message_arrives(self, data: st.DataObject) -> None:
        """One field of a message is wrong, though not the grant: its slot must go round."""
        arriving = self.receiver.transport.arriving
        notification = arriving.pop(data.draw(st.integers(0, len(arriving) - 1)))
        header = KvHeader.FromString(notification.payload)
        field = data.draw(st.sampled_from(["transfer_id", "first_layer", "num_tokens", "byte_count", "checksum"]))
        setattr(header, field, (getattr(header, field) + data.draw(st.integers(1, 9))) % 2**32)
        self.receiver.transport.inbox.append(Notification(notification.peer, header.SerializeToString()))
        self.forged = True

    @rule()
    def seal(self) -> None:
        for event in self.sender.sent():
            transfer = self.transfers[event.transfer_id - 1]
            if event.outcome == "ok" and not transfer.sealed:
                transfer.sealed = True
                self.receiver.machine.receiver.seal(event.transfer_id, event.messages, event.bytes)

    @rule(data=st.data(), sender=st.booleans(), receiver=st.booleans())
    @precondition(lambda self: self.transfers)
    def abort(self, data: st.DataObject, sender: bool, receiver: bool) -> None:
        transfer = data.draw(st.sampled_from(self.transfers))
        transfer.aborted |= sender
        if sender:
            self.sender.machine.sender.abort(transfer.number)
        if receiver:
            self.receiver.machine.receiver.abort(transfer.number)

    @invariant()
    def no_event_comes_twice(self) -> None:
        for events in (self.sender.sent(), self.receiver.received()):
            ids = [event.transfer_id for event in events]
            assert len(ids) == len(set(ids))

    @invariant()
    def finished_pages_rest(self) -> None:
        for event in self.receiver.received():
            target = self.transfers[event.transfer_id - 1].target
            now = self.receiver.tokens[:, :, target]
            assert torch.equal(self.settled.setdefault(event.transfer_id, now.clone()), now)

    @invariant()
    def what_is_ok_is_equal(self) -> None:
        for event in self.receiver.received():
            if event.outcome == "ok":
                transfer = self.transfers[event.transfer_id - 1]
                source = self.sender.tokens[:, :, transfer.source]
                assert torch.equal(self.receiver.tokens[:, :, transfer.target], source)

    @invariant()
    def slots_are_accounted_for(self) -> None:
        self.receiver.machine.receiver._pool.check()

    def teardown(self) -> None:
        """Let everything end: each transfer has its one event on each side, and no slot or buffer is lost."""
        for transfer in self.live():
            self.sender.machine.sender.abort(transfer.number)
        settle(self.sender, self.receiver)
        self.seal()
        settle(self.sender, self.receiver)
        outcomes = {event.transfer_id: event.outcome for event in self.sender.sent()}
        assert len(outcomes) == len(self.transfers)
        for event in self.sender.sent():
            if event.outcome != "ok":
                self.receiver.machine.receiver.abort(event.transfer_id)
        self.clock.now += 11
        settle(self.sender, self.receiver)
        received = {event.transfer_id: event.outcome for event in self.receiver.received()}
        assert len(received) == len(self.transfers)
        if not self.forged:
            ended_well = [n for n, outcome in outcomes.items() if outcome == "ok" and received[n] != "aborted"]
            assert all(received[number] == "ok" for number in ended_well)
        counts, credits = self.receiver.machine.count(), self.sender.machine.sender._lanes["receiver"].credits
        assert (counts.staging.granted, counts.staging.quarantined) == (len(credits), 0)
        assert self.sender.machine.count().send_buffers_in_use == 0
        assert all(write.released for write in self.network.writes)
        self.finished_pages_rest()
        self.what_is_ok_is_equal()


TransferMachineTest.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow]
)
TestTransferMachine = TransferMachineTest.TestCase
