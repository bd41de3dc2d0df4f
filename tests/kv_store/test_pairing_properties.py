"""Pairs break and are made anew at any moment, on either side: no slot gets two writers, nothing is lost or stuck."""

from concurrent.futures import Future

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.pb.tandem.v1.transport_pb2 import KvHeader
from kv_store.layout import as_slots
from kv_store.transfer.pairing import DRAIN_SECONDS, GRACE_SECONDS
from kv_store.transport.base import PeerUnreachable
from tests.kv_store.fakes import FakeClock, FakeNetwork, FakeWorker, settle

TOKENS = 9


class PairingMachine(RuleBasedStateMachine):
    """The words between the two sides come in the order that the pair's stream gives them."""

    revokes = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.network = FakeNetwork(revokes=self.revokes)
        self.sender = FakeWorker(self.network, "sender", self.clock, buffers=3)
        self.receiver = FakeWorker(self.network, "receiver", self.clock, blocks=400)
        #: The sender's `connect` calls, none of which is forgotten.
        self.connects: list[Future[None]] = []
        #: Which of them the receiver has answered; credits of any other stream are void.
        self.answered = -1
        self.opened = 0
        self.settled: dict[int, torch.Tensor] = {}
        self.sender_connects()
        self.receiver_connects()

    # --- one side after the other ----------------------------------------------------------------------

    @rule()
    def sender_connects(self) -> None:
        self.connects.append(self.sender.connect(self.receiver, receive=False))

    @rule()
    @precondition(lambda self: self.stands() and self.answered < len(self.connects) - 1)
    def receiver_connects(self) -> None:
        """Each pairing of the sender is answered once: that it was made proves that earlier writes have ended."""
        self.receiver.take_credits()
        self.receiver.connect(self.sender, receive=True).result(0)
        self.answered = len(self.connects) - 1
        self.run_receiver()

    @rule()
    def sender_disconnects(self) -> None:
        self.sender.machine.pairing.disconnect("receiver", "closed")

    @rule()
    def receiver_disconnects(self) -> None:
        self.receiver.machine.pairing.disconnect("sender", "closed")

    @rule()
    def run_sender(self) -> None:
        self.sender.machine.round()

    @rule()
    def run_receiver(self) -> None:
        self.receiver.machine.round()
        credits = self.receiver.take_credits()
        if self.stands() and self.answered == len(self.connects) - 1:
            self.sender.machine.sender.add_credits("receiver", credits)

    # --- between them -----------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: not self.stands() or self.answered < len(self.connects) - 1)
    def pair_in_order(self) -> None:
        self.sender_connects()
        self.sender.machine.round()
        if self.stands():
            self.receiver_connects()

    @rule()
    @precondition(lambda self: self.opened < 20)
    def transfer(self) -> None:
        """Opened on both sides; what credits allow is under way."""
        self.opened += 1
        number, target = self.opened, as_slots(self.target(self.opened))
        self.receiver.machine.receiver.open(number, "sender", 0, target)
        self.sender.machine.sender.open(number, "receiver", TOKENS, 0)
        self.sender.machine.sender.begin_chunk(number, number, 0, as_slots(self.source(number)))
        self.sender.machine.sender.layers_ready([number], 3, None, self.clock.now)
        self.sender.machine.sender.close(number)
        self.sender.machine.round()

    @rule(data=st.data())
    @precondition(lambda self: self.network.pending())
    def write_ends(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.network.pending())).complete()

    @rule()
    def messages_arrive(self) -> None:
        self.receiver.transport.deliver_all()

    @rule(seconds=st.sampled_from([0.1, GRACE_SECONDS, DRAIN_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    # --- what holds -------------------------------------------------------------------------------------

    @invariant()
    def slots_are_accounted_for(self) -> None:
        self.receiver.machine.receiver._pool.check()
        if self.revokes:
            assert self.receiver.machine.count().staging.quarantined == 0

    @invariant()
    def slots_that_are_written_belong_to_their_writer(self) -> None:
        for write in [] if self.revokes else self.network.pending():
            header = KvHeader.FromString(write.notification.payload)
            slot = self.receiver.machine.receiver._pool._slots[header.slot]
            assert (slot.granted, slot.peer, slot.generation) == (True, "sender", header.generation)

    @invariant()
    def no_event_comes_twice(self) -> None:
        for events in (self.sender.sent(), self.receiver.received()):
            ids = [event.transfer_id for event in events]
            assert len(ids) == len(set(ids))

    @invariant()
    def finished_pages_rest_and_are_right(self) -> None:
        for event in self.receiver.received():
            now = self.receiver.tokens[:, :, self.target(event.transfer_id)]
            assert torch.equal(self.settled.setdefault(event.transfer_id, now.clone()), now)
            if event.outcome == "ok":
                assert torch.equal(now, self.sender.tokens[:, :, self.source(event.transfer_id)])

    def teardown(self) -> None:
        """When the network is kind again the two pair, unless nobody knows what a failed write may still do."""
        self.sender_connects()
        for write in self.network.pending():
            write.complete()
        self.sender.machine.round()
        assert all(future.done() for future in self.connects)
        assert self.sender.machine.count().send_buffers_in_use == 0
        assert all(write.released for write in self.network.writes)
        if not self.stands():
            assert isinstance(self.connects[-1].exception(), PeerUnreachable)
            assert self.sender.machine.sender.uncertain("receiver") and not self.revokes
            return
        self.receiver_connects()
        settle(self.sender, self.receiver)
        assert self.receiver.machine.count().staging.quarantined == 0
        self.transfer()
        settle(self.sender, self.receiver)
        sent = self.sender.sent()[-1]
        self.receiver.machine.receiver.seal(sent.transfer_id, sent.messages, sent.bytes)
        assert (sent.outcome, self.receiver.received()[-1].outcome) == ("ok", "ok")
        assert len(self.sender.sent()) == self.opened
        self.finished_pages_rest_and_are_right()

    # --- inside -----------------------------------------------------------------------------------------

    def stands(self) -> bool:
        """Whether the last word on the sender's side is that it is paired."""
        return bool(self.connects) and self.connects[-1].done() and self.connects[-1].exception() is None

    def source(self, number: int) -> list[int]:
        return [(number * 7 + token) % self.sender.tokens.shape[2] for token in range(TOKENS)]

    def target(self, number: int) -> list[int]:
        return list(range(number * TOKENS, (number + 1) * TOKENS))


class RevokingPairingMachine(PairingMachine):
    """The same where disconnecting is proof enough, as with gRPC."""

    revokes = True


_SETTINGS = settings(max_examples=80, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
PairingMachine.TestCase.settings = _SETTINGS
RevokingPairingMachine.TestCase.settings = _SETTINGS
TestPairing = PairingMachine.TestCase
TestRevokingPairing = RevokingPairingMachine.TestCase
