"""A transport whose writes end and whose notifications arrive when, and how, the test says; and a worker on it."""

from collections import Counter
from concurrent.futures import Future

import torch
from torch import Tensor

from kv_store.staging import SlotGrant
from kv_store.transfer.events import CreditsReady, PeerLost, ReceiveFinished, SendFinished, TransferEvent
from kv_store.transfer.machine import TransferMachine
from kv_store.transport.base import Notification, PeerUnreachable, WriteState


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeWrite:
    """A pending write; like RDMA it reads the source when it ends, not when it is posted."""

    def __init__(self, source: Tensor, target: "FakeTransport", offset: int, notification: Notification) -> None:
        self.notification = notification
        self.target = target
        #: Of the target's pairings with the writer, the one that this write belongs to.
        self._pairing = target.pairings[notification.peer]
        self._source = source
        self._offset = offset
        self._state = WriteState.PENDING
        self.released = False

    def state(self) -> WriteState:
        return self._state

    def complete(self, *, flip: bool = False) -> None:
        """The data arrives (with one wrong bit: `flip`); the notification is kept back in `target.arriving`."""
        assert self.target.staging is not None
        if self.target.revokes_on_disconnect and not self.target.admits(self.notification.peer, self._pairing):
            self.fail()
            return
        region = self.target.staging[self._offset : self._offset + len(self._source)]
        region.copy_(self._source)
        if flip:
            region[len(region) // 2] ^= 1
        self._state = WriteState.DONE
        self.target.arriving.append(self.notification)

    def fail(self) -> None:
        self._state = WriteState.FAILED

    def release(self) -> None:
        assert self._state is not WriteState.PENDING, "released while pending"
        assert not self.released, "released twice"
        self.released = True


class FakeNetwork:
    def __init__(self, *, revokes: bool = False) -> None:
        self.revokes = revokes
        self.agents: dict[str, FakeTransport] = {}
        self.writes: list[FakeWrite] = []

    def pending(self) -> list[FakeWrite]:
        return [write for write in self.writes if write.state() is WriteState.PENDING]


class FakeTransport:
    kind = "fake"

    def __init__(self, network: FakeNetwork, agent: str) -> None:
        self.agent = agent
        self.revokes_on_disconnect = network.revokes
        self.staging: Tensor | None = None
        #: Notifications that have not been delivered, and those that `poll` returns next.
        self.arriving: list[Notification] = []
        self.inbox: list[Notification] = []
        self.peers: set[str] = set()
        #: How often each peer was connected.
        self.pairings: Counter[str] = Counter()
        self.unreachable: set[str] = set()
        self._network = network
        self._source: Tensor | None = None
        network.agents[agent] = self

    def register_staging(self, memory: Tensor) -> None:
        self.staging = memory

    def register_source(self, memory: Tensor) -> None:
        self._source = memory

    def metadata(self) -> bytes:
        return b"fake"

    def connect(self, peer: str, metadata: bytes, staging_base: int) -> None:
        if peer in self.unreachable:
            raise PeerUnreachable(peer)
        self.peers.add(peer)
        self.pairings[peer] += 1

    def disconnect(self, peer: str) -> None:
        self.peers.discard(peer)
        for write in self._network.pending():
            if (write.notification.peer, write.target.agent) == (self.agent, peer):
                write.fail()

    def admits(self, peer: str, pairing: int) -> bool:
        """Whether writes that `peer` posted during that pairing may still land."""
        return peer in self.peers and self.pairings[peer] == pairing

    def write(self, peer: str, source_offset: int, offset: int, length: int, notification: bytes) -> FakeWrite:
        if peer not in self.peers or peer in self.unreachable:
            raise PeerUnreachable(peer)
        assert self._source is not None
        source = self._source[source_offset : source_offset + length]
        write = FakeWrite(source, self._network.agents[peer], offset, Notification(self.agent, notification))
        self._network.writes.append(write)
        return write

    def poll(self) -> list[Notification]:
        taken, self.inbox = self.inbox, []
        return taken

    def deliver_all(self) -> None:
        self.inbox += self.arriving
        self.arriving.clear()

    def close(self) -> None:
        self.peers.clear()


class FakeWorker:
    """A TransferMachine without a thread; its incarnation and its agent name differ, as in real life."""

    def __init__(
        self,
        network: FakeNetwork,
        name: str,
        clock: FakeClock,
        *,
        block_size: int = 4,
        blocks: int = 32,
        layers: int = 3,
        slots: int = 8,
        slot_tokens: int = 4,
        buffers: int = 4,
        checksum: bool = True,
    ) -> None:
        self.name = name
        self.pages = torch.randn(layers, 2, blocks, block_size, 2, 4)
        self.events: list[TransferEvent] = []
        self.transport = FakeTransport(network, f"agent/{name}")
        #: [layers, 2, slots, heads, dim].
        self.tokens = self.pages.view(layers, 2, -1, 2, 4)
        self.machine = TransferMachine(
            transport=self.transport,
            pages=self.pages,
            staging_slots=slots,
            slot_bytes=slot_tokens * 2 * 2 * 4 * 4,
            send_buffers=buffers,
            incarnation=name,
            checksum=checksum,
            emit=self.events.append,
            clock=clock,
            device=torch.device("cpu"),
            seal_timeout=10.0,
        )

    def connect(self, other: "FakeWorker", *, receive: bool) -> "Future[None]":
        future: Future[None] = Future()
        self.machine.pairing.connect(other.name, other.machine.local_peer(), receive, future)
        return future

    def take_credits(self) -> list[SlotGrant]:
        """Remove and return the credits among the events."""
        credits = [grant for event in self.events if isinstance(event, CreditsReady) for grant in event.grants]
        self.events[:] = [event for event in self.events if not isinstance(event, CreditsReady)]
        return credits

    def sent(self) -> list[SendFinished]:
        return [event for event in self.events if isinstance(event, SendFinished)]

    def received(self) -> list[ReceiveFinished]:
        return [event for event in self.events if isinstance(event, ReceiveFinished)]

    def lost(self) -> list[PeerLost]:
        return [event for event in self.events if isinstance(event, PeerLost)]

    def close(self) -> None:
        self.machine.finish("closing", 0.0)


def pair(sender: FakeWorker, receiver: FakeWorker) -> None:
    """Pair two workers and hand over the first credits."""
    sender.connect(receiver, receive=False).result(0)
    receiver.connect(sender, receive=True).result(0)
    settle(sender, receiver)


def settle(sender: FakeWorker, receiver: FakeWorker) -> None:
    """Run both sides with a perfect network until nothing moves."""
    moving = True
    while moving:
        moving = sender.machine.round()
        for write in sender.transport._network.pending():
            write.complete()
            moving = True
        receiver.transport.deliver_all()
        moving |= receiver.machine.round()
        credits = receiver.take_credits()
        moving |= bool(credits)
        sender.machine.sender.add_credits(receiver.name, credits)
