"""The receiving half of a worker: from notifications to pages. No thread, no clock of its own, no transport.

Life of a receive: open (pages are reserved) -> messages land in staging slots and are scattered -> seal (the
sender has said how much it wrote) -> ReceiveFinished. A message is used only if its header passes every check;
otherwise it is dropped and counted, its slot goes round again when the grant was valid, and nobody else notices.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from common.pb.tandem.v1.transport_pb2 import KvHeader
from kv_store.layout import PageCopier, Slots
from kv_store.staging import SlotUse, StagingCounts, StagingPool
from kv_store.transfer.counters import Drop, ReceiverTotals
from kv_store.transfer.coverage import Coverage
from kv_store.transfer.events import CreditsReady, Outcome, ReceiveFinished, TransferEvent
from kv_store.transfer.header import checksum, parse_header, range_error, size_error

logger = logging.getLogger(__name__)

_DROP_OF_USE = {SlotUse.DUPLICATE: Drop.DUPLICATE, SlotUse.LATE: Drop.LATE, SlotUse.FOREIGN: Drop.FOREIGN}


@dataclass(slots=True)
class _Receive:
    transfer_id: int
    peer: str
    first_token: int
    #: Flat slot of each token, int64 [t].
    slots: Slots
    coverage: Coverage
    messages: int = 0
    bytes: int = 0
    #: (messages, bytes) that the sender wrote, once it has said so.
    sealed: tuple[int, int] | None = None
    sealed_at: float = 0.0
    last_landed: float = 0.0

    @property
    def counted(self) -> tuple[int, int]:
        return self.messages, self.bytes


class KVReceiver:
    """Owns the staging slots and all open receives of a worker. Called on one thread only."""

    def __init__(
        self,
        *,
        incarnation: str,
        copier: PageCopier,
        staging: Tensor,
        slot_bytes: int,
        emit: Callable[[TransferEvent], None],
        clock: Callable[[], float],
        seal_timeout: float = 10.0,
    ) -> None:
        assert staging.numel() % slot_bytes == 0, f"{staging.numel()} bytes are no multiple of {slot_bytes}"
        self.totals = ReceiverTotals()
        self._incarnation = incarnation
        self._copier = copier
        self._staging = staging
        self._slot_bytes = slot_bytes
        self._emit = emit
        self._clock = clock
        self._seal_timeout = seal_timeout
        self._pool = StagingPool(staging.numel() // slot_bytes)
        #: Peers that may write here, in the order they came.
        self._peers: dict[str, None] = {}
        self._receives: dict[int, _Receive] = {}
        #: Peers that hold a slot or can be granted one. Replaced, never changed: any thread may read it.
        self.writers: frozenset[str] = frozenset()
        #: Whether slots, peers or receives changed since credits were last granted.
        self._credits_stale = False

    # --- peers ---------------------------------------------------------------------------------------

    def add_peer(self, peer: str) -> None:
        """Let `peer` write: it gets its first credits with the next `tick`."""
        self._credits_stale = True
        self._pool.add_peer(peer)
        self._peers[peer] = None
        # Now, not with the next `tick`: whoever hears that the pairing stands may ask at once.
        self._note_writers()

    def remove_peer(self, peer: str, reason: str, proof: bool) -> int:
        """Fail the receives from `peer` and take its slots; returns how many are quarantined for want of `proof`."""
        for receive in [r for r in self._receives.values() if r.peer == peer]:
            self._finish(receive, "failed", reason)
        self._credits_stale = True
        self._peers.pop(peer, None)
        taken = self._pool.revoke_peer(peer, proof)
        self._note_writers()
        return 0 if proof else taken

    def prove_dead(self, peer: str) -> int:
        """Nothing of `peer`'s earlier writes can arrive any more: free what is quarantined because of it."""
        self._credits_stale = True
        return self._pool.prove_dead(peer)

    # --- receives ------------------------------------------------------------------------------------

    def open(self, transfer_id: int, peer: str, first_token: int, slots: Slots) -> None:
        """Expect the KV of tokens [first_token, +len(slots)); fails at once if `peer` is not connected."""
        assert transfer_id not in self._receives, f"receive {transfer_id} is open already"
        coverage = Coverage(self._copier.shape.num_layers, len(slots))
        receive = _Receive(transfer_id, peer, first_token, slots, coverage)
        self._receives[transfer_id] = receive
        self._credits_stale = True
        if peer not in self._peers:
            self._finish(receive, "failed", f"{peer} is not connected")

    def seal(self, transfer_id: int, messages: int, num_bytes: int) -> None:
        """The sender wrote this much; unknown ids are ignored (the transfer ended before)."""
        receive = self._receives.get(transfer_id)
        if receive is None:
            return
        receive.sealed = (messages, num_bytes)
        receive.sealed_at = self._clock()
        self._settle(receive)

    def abort(self, transfer_id: int) -> None:
        receive = self._receives.get(transfer_id)
        if receive is not None:
            self._finish(receive, "aborted", "aborted")

    # --- progress ------------------------------------------------------------------------------------

    def on_message(self, peer: str, payload: bytes) -> None:
        """A write of `peer` has landed; `payload` is its header."""
        header = parse_header(payload)
        if header is None:
            self._drop(Drop.CORRUPT, peer, "the header cannot be read")
            return
        if header.sender != peer or header.receiver != self._incarnation:
            self._drop(Drop.FOREIGN, peer, f"from {header.sender!r} for {header.receiver!r}")
            return
        use = self._pool.use(header.slot, header.generation, peer)
        if use is not SlotUse.OK:
            self._drop(_DROP_OF_USE[use], peer, f"slot {header.slot} generation {header.generation}")
            return
        self._credits_stale = True
        receive = self._receives.get(header.transfer_id)
        if receive is None or receive.peer != peer:
            self._drop(Drop.LATE, peer, f"transfer {header.transfer_id} is not open")
            return
        self._take(receive, header)

    def tick(self) -> None:
        """Grant credits and give up on sealed receives whose messages do not come."""
        now = self._clock()
        for receive in [r for r in self._receives.values() if r.sealed is not None]:
            if now - max(receive.sealed_at, receive.last_landed) > self._seal_timeout:
                self._finish(receive, "failed", f"sealed at {receive.sealed}, only {receive.counted} came")
        if self._credits_stale:
            self._credits_stale = False
            for peer in self._peers:
                self._top_up(peer)
            self._note_writers()

    def held_by(self, peer: str) -> int:
        """Slots granted to `peer`, or quarantined because of it."""
        return self._pool.held_by(peer)

    @property
    def num_open(self) -> int:
        return len(self._receives)

    def staging_counts(self) -> StagingCounts:
        return self._pool.counts()

    def fail_all(self, reason: str) -> None:
        """The transfer thread ends: every open receive fails."""
        for receive in list(self._receives.values()):
            self._finish(receive, "failed", reason)

    # --- inside --------------------------------------------------------------------------------------

    def _take(self, receive: _Receive, header: KvHeader) -> None:
        """The slot is ours again after this call, whatever the header says."""
        shape = self._copier.shape
        if (error := range_error(header, shape, receive.first_token, len(receive.slots))) is not None:
            self._reject(receive, Drop.CORRUPT, error)
            return
        if (error := size_error(header, shape, self._slot_bytes)) is not None:
            self._reject(receive, Drop.TRUNCATED, error)
            return
        start = header.first_token - receive.first_token
        area = (header.first_layer, header.num_layers, start, header.num_tokens)
        if receive.coverage.overlaps(*area):
            self._drop(Drop.DUPLICATE, receive.peer, f"layers and tokens {area} of transfer {receive.transfer_id}")
            return
        offset = header.slot * self._slot_bytes
        wire = self._staging[offset : offset + header.byte_count]
        if header.HasField("checksum") and checksum(wire) != header.checksum:
            self._reject(receive, Drop.CORRUPT, "wrong checksum")
            return
        self._copier.scatter(
            header.first_layer, header.num_layers, receive.slots[start : start + header.num_tokens], wire
        )
        receive.coverage.add(*area)
        self._count(receive, header.byte_count)
        self._settle(receive)

    def _count(self, receive: _Receive, num_bytes: int) -> None:
        receive.messages += 1
        receive.bytes += num_bytes
        receive.last_landed = self._clock()
        self.totals.messages += 1
        self.totals.bytes += num_bytes

    def _settle(self, receive: _Receive) -> None:
        """End a sealed receive as soon as its fate is clear; messages may still be on their way until then."""
        if receive.sealed is None:
            return
        if receive.counted == receive.sealed and receive.coverage.complete:
            self._finish(receive, "ok", "")
        elif receive.coverage.complete or receive.messages >= receive.sealed[0]:
            missing = receive.coverage.missing
            self._finish(receive, "failed", f"sealed at {receive.sealed}, {receive.counted} came, {missing} missing")

    def _finish(self, receive: _Receive, outcome: Outcome, reason: str) -> None:
        del self._receives[receive.transfer_id]
        after_seal = max(0.0, receive.last_landed - receive.sealed_at) if receive.sealed is not None else 0.0
        self._emit(
            ReceiveFinished(
                transfer_id=receive.transfer_id,
                peer=receive.peer,
                outcome=outcome,
                messages=receive.messages,
                bytes=receive.bytes,
                reason=reason,
                last_landed=receive.last_landed,
                landed_after_seal=after_seal,
            )
        )

    def _reject(self, receive: _Receive, drop: Drop, reason: str) -> None:
        """A message that its sender meant for this transfer is unusable, so the transfer is too."""
        self._drop(drop, receive.peer, reason)
        self._finish(receive, "failed", f"a message was {drop.value}: {reason}")

    def _drop(self, drop: Drop, peer: str, reason: str) -> None:
        self.totals.dropped[drop] += 1
        # Late messages are what every abort leaves behind.
        level = logging.DEBUG if drop is Drop.LATE else logging.WARNING
        logger.log(level, "dropped a KV message of %s (%s): %s", peer, drop.value, reason)

    def _note_writers(self) -> None:
        self.writers = frozenset(peer for peer in self._peers if self._pool.can_write(peer))

    def _top_up(self, peer: str) -> None:
        """Keep `peer` in credits: as many as it can use, up to its share, and a few while idle."""
        held = self._pool.held_by(peer)
        wanted = min(self._pool.share(), self._pool.min_share + self._demand(peer))
        # Several credits to a message, unless the peer is about to run out.
        if wanted - held < max(1, wanted // 4) and held > self._pool.min_share:
            return
        grants = self._pool.grant(peer, wanted - held) if wanted > held else []
        if grants:
            self._emit(CreditsReady(peer, tuple(grants)))

    def _demand(self, peer: str) -> int:
        """An upper bound of the messages that the last chunks of `peer`'s transfers can still need."""
        shape = self._copier.shape
        demand = 0
        for receive in self._receives.values():
            if receive.peer == peer and not receive.coverage.complete:
                missing_bytes = receive.coverage.missing * shape.token_layer_bytes
                demand += receive.coverage.missing_layers - (-missing_bytes // self._slot_bytes)
        return demand
