"""Which peers this worker is paired with, and what becomes of those that went away.

A slot granted to a peer that is gone is used again only when nothing can be written into it any more: the
transport has revoked it, the peer's process is dead, or the peer has answered anew, which it does only when its
earlier writes have ended. Until then it stays in quarantine.

The death of a process on this host is seen here. That of any other is known only from whoever calls `prove_dead`,
as when its stable worker id comes back under a new incarnation. A peer on another host that has no stable id, or
never comes back, therefore keeps its slots for ever: no timeout proves that RDMA has ended. Such slots are counted
(`quarantined_out_of_sight`), and only a restart of this worker brings them back.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from common.pb.tandem.v1.transport_pb2 import TransportPeer
from kv_store.process import ProcessId
from kv_store.transfer.events import PeerLost, TransferEvent
from kv_store.transfer.receiver import KVReceiver
from kv_store.transfer.sender import KVSender
from kv_store.transport.base import PeerUnreachable, Transport

logger = logging.getLogger(__name__)

#: What a dead sender had handed to the kernel may still sit in our socket: poll this long before trusting a proof.
GRACE_SECONDS = 0.2
#: How often to look whether the processes of quarantined peers have died.
PROOF_INTERVAL_SECONDS = 0.5
#: How long the writes to a disconnected peer may take to end by themselves.
DRAIN_SECONDS = 10.0
#: How long to poll briskly after pairing: the wires of some transports are set up only while both sides poll.
WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    agent: str
    process: ProcessId
    receive: bool


@dataclass(slots=True)
class _Gone:
    """A peer because of which slots are quarantined."""

    peer: _Peer
    next_check: float
    #: Whether its death can be seen from here.
    visible: bool
    #: When its death was proved.
    proved_at: float | None = None


@dataclass(slots=True)
class _Draining:
    """A peer that was disconnected while writes to it were under way."""

    peer: _Peer
    deadline: float
    #: The deadline has passed, and the transport was told to disconnect.
    cut: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    """A `connect` that waits for the earlier pairing's writes to end."""

    peer: str
    info: TransportPeer
    receive: bool
    paired: "Future[None]"


class Pairing:
    """Pairs and parts; called on one thread only."""

    def __init__(
        self,
        *,
        transport: Transport,
        sender: KVSender,
        receiver: KVReceiver,
        token_bytes: int,
        emit: Callable[[TransferEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._sender = sender
        self._receiver = receiver
        self._token_bytes = token_bytes
        self._emit = emit
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        #: Names by the transport's name; holds peers in quarantine too, whose late messages free their slots.
        self._name_of: dict[str, str] = {}
        self._gone: dict[str, _Gone] = {}
        self._draining: dict[str, _Draining] = {}
        self._waiting: list[_Request] = []
        self._warm_until = 0.0

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    @property
    def wants_polling(self) -> bool:
        """Whether something here moves on only while the transport is polled."""
        proving = any(gone.proved_at is not None for gone in self._gone.values())
        return bool(self._waiting or self._draining) or proving or self._clock() < self._warm_until

    @property
    def has_quarantine(self) -> bool:
        return bool(self._gone)

    def quarantined_out_of_sight(self) -> int:
        """Quarantined slots of peers whose death cannot be seen from here."""
        return sum(self._receiver.held_by(name) for name, gone in self._gone.items() if not gone.visible)

    def name_of(self, agent: str) -> str | None:
        """The peer behind the transport's name for it."""
        return self._name_of.get(agent)

    def connect(self, peer: str, info: TransportPeer, receive: bool, paired: "Future[None]") -> None:
        """Pair with `peer`; `paired` resolves when writes of an earlier pairing have ended and this one stands."""
        if paired.set_running_or_notify_cancel():
            self._waiting.append(_Request(peer, info, receive, paired))
            self._pair_waiting()

    def disconnect(self, peer: str, reason: str) -> None:
        """Part from `peer`: its transfers fail, and so does a `connect` that waits. Unknown peers are ignored."""
        given_up = [request for request in self._waiting if request.peer == peer]
        self._waiting = [request for request in self._waiting if request.peer != peer]
        for request in given_up:
            request.paired.set_exception(PeerUnreachable(reason))
        self._part(peer, reason)

    def lose(self, peer: str, reason: str) -> None:
        """The transport cannot reach `peer` any more."""
        logger.warning("lost peer %s: %s", peer, reason)
        self.disconnect(peer, reason)
        self._emit(PeerLost(peer, reason))

    def prove_dead(self, peer: str) -> None:
        """Somebody who knows says that the process of `peer` is dead."""
        self.disconnect(peer, "its process is dead")
        gone = self._gone.get(peer)
        if gone is not None and gone.proved_at is None:
            gone.proved_at = self._clock()

    def tick(self) -> None:
        for draining in list(self._draining.values()):
            self._check_drained(draining)
        for gone in list(self._gone.values()):
            self._check_gone(gone)
        if self._waiting:
            self._pair_waiting()

    def fail_waiting(self, reason: str) -> None:
        """The transfer thread ends: nobody will be paired any more."""
        for request in self._waiting:
            request.paired.set_exception(PeerUnreachable(reason))
        self._waiting.clear()

    def _part(self, peer: str, reason: str) -> None:
        record = self._peers.pop(peer, None)
        if record is None:
            return
        self._sender.remove_peer(peer, reason)
        revoked = self._transport.revokes_on_disconnect
        if self._sender.draining(peer) and not revoked:
            self._draining[peer] = _Draining(record, self._clock() + DRAIN_SECONDS)
        else:
            self._transport.disconnect(record.agent)
        quarantined = self._receiver.remove_peer(peer, reason, proof=revoked or not record.receive)
        if quarantined:
            self._quarantine(record, quarantined)
        else:
            del self._name_of[record.agent]

    def _quarantine(self, peer: _Peer, slots: int) -> None:
        visible = peer.process.is_visible()
        self._gone[peer.name] = _Gone(peer, next_check=self._clock(), visible=visible)
        logger.log(
            logging.INFO if visible else logging.WARNING,
            "%d staging slots are quarantined until %s is provably gone%s",
            slots,
            peer.name,
            "" if visible else ", which cannot be seen from this host",
        )

    def _pair_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            try:
                if self._pair(request):
                    request.paired.set_result(None)
                else:
                    self._waiting.append(request)
            except (PeerUnreachable, ValueError) as error:
                request.paired.set_exception(error)

    def _pair(self, request: _Request) -> bool:
        """False if writes of an earlier pairing are still under way."""
        peer, info = request.peer, request.info
        self._check(peer, info)
        self._part(peer, "it was paired anew")
        # The sender's word counts: a transport that revokes has ended them at once, but they are not reaped yet.
        if peer in self._draining or self._sender.draining(peer):
            return False
        self._transport.connect(info.agent, info.metadata, info.staging_base)
        process = ProcessId(info.host_id, info.pid, info.process_start)
        self._peers[peer] = _Peer(peer, info.agent, process, request.receive)
        self._name_of[info.agent] = peer
        if self._gone.pop(peer, None) is not None:
            self._receiver.prove_dead(peer)
        self._sender.add_peer(peer, info.agent, info.slot_bytes, info.num_slots)
        if request.receive:
            self._receiver.add_peer(peer)
        self._warm_until = self._clock() + WARM_UP_SECONDS
        return True

    def _check(self, peer: str, info: TransportPeer) -> None:
        if info.transport != self._transport.kind:
            raise ValueError(f"transport: {peer} uses {info.transport!r}, this worker {self._transport.kind!r}")
        if info.slot_bytes < self._token_bytes:
            raise ValueError(f"slot_bytes: {info.slot_bytes} of {peer} hold no token of {self._token_bytes} bytes")
        if self._sender.uncertain(peer) and not self._transport.revokes_on_disconnect:
            raise PeerUnreachable(f"a write to {peer} ended in an error; pair with its next incarnation")

    def _check_drained(self, draining: _Draining) -> None:
        peer = draining.peer
        if self._sender.draining(peer.name):
            if not draining.cut and self._clock() > draining.deadline:
                draining.cut = True
                logger.warning("writes to %s do not end; cutting the connection", peer.name)
                self._transport.disconnect(peer.agent)
            return
        del self._draining[peer.name]
        if not draining.cut:
            self._transport.disconnect(peer.agent)

    def _check_gone(self, gone: _Gone) -> None:
        name, now = gone.peer.name, self._clock()
        if gone.proved_at is None and now >= gone.next_check:
            gone.next_check = now + PROOF_INTERVAL_SECONDS
            gone.proved_at = now if gone.peer.process.is_dead() else None
        proved = gone.proved_at is not None and now - gone.proved_at >= GRACE_SECONDS
        if proved or self._receiver.held_by(name) == 0:
            freed = self._receiver.prove_dead(name)
            logger.info("%s is gone for good: %d staging slots are free again", name, freed)
            del self._gone[name], self._name_of[gone.peer.agent]
