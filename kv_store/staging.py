"""Slots of staging memory: which peer may write into which, and which are free. Books only, no memory.

A receiver's slot is `free`, `granted` (to one peer under one generation) or `quarantined` (granted to a peer
that went away without proof that it can write no more). free + granted + quarantined = total at any moment.
Quarantine has no time limit: it ends with a proof, or never (see transfer/pairing.py for what proves it).
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """Leave to write once into `slot`; the write's header repeats `generation`."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class StagingCounts:
    free: int
    granted: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.granted + self.quarantined


class SlotUse(Enum):
    """What a message's claim on a slot turned out to be."""

    OK = "ok"
    #: The same grant was used before and the slot has not been granted since.
    DUPLICATE = "duplicate"
    #: The slot has been granted again since.
    LATE = "late"
    #: Never granted like that, or granted to somebody else.
    FOREIGN = "foreign"


@dataclass(slots=True)
class _Slot:
    generation: int = 0
    #: Who may write (or wrote last, when free).
    peer: str = ""
    granted: bool = False
    quarantined: bool = False


class StagingPool:
    """The receiver's slots. Not thread-safe.

    Each peer always gets `min_share` slots while any are free; beyond that a peer is kept to an even share, and
    a quarter of the slots stays back so that a newcomer need not wait for an idle peer to use its grants.
    """

    def __init__(self, num_slots: int, min_share: int = 2) -> None:
        assert num_slots >= min_share > 0, f"{num_slots} staging slots, at least {min_share} are needed"
        self._slots = [_Slot() for _ in range(num_slots)]
        #: Last freed, first granted: its memory is still in the caches.
        self._free = list(range(num_slots))
        #: Granted or quarantined slots by peer.
        self._held: Counter[str] = Counter()
        self._quarantined = 0
        self.min_share = min_share
        self._reserve = num_slots // 4 // min_share * min_share
        self._peers: set[str] = set()

    def add_peer(self, peer: str) -> None:
        """Count `peer` among those that share the slots."""
        self._peers.add(peer)

    def held_by(self, peer: str) -> int:
        """Slots granted to `peer` (or quarantined because of it)."""
        return self._held[peer]

    def share(self) -> int:
        """The most slots that one peer is granted now."""
        even = (len(self._slots) - self._reserve) // max(1, len(self._peers))
        return max(self.min_share, even)

    def grant(self, peer: str, n: int) -> list[SlotGrant]:
        """Up to `n` slots for `peer`, fewer (or none) when it has its share or slots are short."""
        assert peer in self._peers, f"{peer} shares no staging slots"
        held = self._held[peer]
        guaranteed = min(self.min_share - held, len(self._free))
        fair = min(self.share() - held, len(self._free) - self._reserve)
        return [self._grant_one(peer) for _ in range(min(n, max(guaranteed, fair)))]

    def can_write(self, peer: str) -> bool:
        """Whether `peer` holds a slot, or could be granted one now."""
        return self._held[peer] > 0 or bool(self._free)

    def use(self, slot: int, generation: int, peer: str) -> SlotUse:
        """A message claims this grant. OK frees the slot, a quarantined one too: the write into it has ended."""
        if not 0 <= slot < len(self._slots):
            return SlotUse.FOREIGN
        state = self._slots[slot]
        if 0 < generation < state.generation:
            return SlotUse.LATE
        if generation != state.generation or state.peer != peer:
            return SlotUse.FOREIGN
        if not state.granted:
            return SlotUse.DUPLICATE
        self._release(slot)
        return SlotUse.OK

    def revoke_peer(self, peer: str, proof: bool) -> int:
        """`peer` is gone. With proof that it writes no more its slots are freed, else quarantined; returns how many."""
        self._peers.discard(peer)
        held = self._slots_of(peer)
        for slot in held:
            if proof:
                self._release(slot)
            elif not self._slots[slot].quarantined:
                self._slots[slot].quarantined = True
                self._quarantined += 1
        return len(held)

    def prove_dead(self, peer: str) -> int:
        """The process of `peer` is dead (or its writes are over): free what is quarantined because of it."""
        slots = [slot for slot in self._slots_of(peer) if self._slots[slot].quarantined]
        for slot in slots:
            self._release(slot)
        return len(slots)

    def counts(self) -> StagingCounts:
        held = sum(self._held.values())
        return StagingCounts(len(self._free), held - self._quarantined, self._quarantined)

    def check(self) -> None:
        """Prove free + granted + quarantined = total from the slots themselves."""
        states = Counter((s.granted, s.quarantined) for s in self._slots)
        counted = StagingCounts(states[False, False], states[True, False], states[True, True])
        assert counted == self.counts(), f"{counted} in the slots, {self.counts()} in the books"
        assert len(set(self._free)) == len(self._free) == counted.free, f"free list {list(self._free)}"

    def _grant_one(self, peer: str) -> SlotGrant:
        slot = self._free.pop()
        state = self._slots[slot]
        state.generation += 1
        state.peer, state.granted = peer, True
        self._held[peer] += 1
        return SlotGrant(slot, state.generation)

    def _release(self, slot: int) -> None:
        state = self._slots[slot]
        self._quarantined -= state.quarantined
        state.granted = state.quarantined = False
        self._held[state.peer] -= 1
        if not self._held[state.peer]:
            del self._held[state.peer]
        self._free.append(slot)

    def _slots_of(self, peer: str) -> list[int]:
        return [number for number, slot in enumerate(self._slots) if slot.granted and slot.peer == peer]


class SendBuffers:
    """The sender's buffers, each as large as a slot. Not thread-safe.

    A peer that stopped reading keeps its buffers until its writes end, so none may hold more than its share.
    """

    def __init__(self, num_buffers: int) -> None:
        assert num_buffers > 0, "at least one send buffer is needed"
        self._total = num_buffers
        self._free = list(range(num_buffers))
        self._held: Counter[str] = Counter()

    def available(self, peer: str, num_peers: int) -> bool:
        """Whether a write to `peer`, one of `num_peers`, may have a buffer now."""
        share = max(1, self._total // max(1, num_peers))
        return bool(self._free) and self._held[peer] < share

    def acquire(self, peer: str) -> int:
        """A buffer for a write to `peer`; only when one is available."""
        self._held[peer] += 1
        return self._free.pop()

    def release(self, peer: str, buffer: int) -> None:
        assert self._held[peer] > 0, f"{peer} holds no send buffer"
        assert buffer not in self._free, f"send buffer {buffer} is free already"
        self._held[peer] -= 1
        self._free.append(buffer)

    @property
    def in_use(self) -> int:
        return self._total - len(self._free)
