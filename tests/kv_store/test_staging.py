from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kv_store.staging import SendBuffers, SlotGrant, SlotUse, StagingPool

PEERS = ["a", "b", "c"]


class StagingMachine(RuleBasedStateMachine):
    """Any order of grants, uses, losses and proofs keeps the books, and no slot has two writers."""

    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.pool = StagingPool(10)
        self.peers: set[str] = set()
        #: Slots somebody may still write into, as the test sees it.
        self.writable: dict[int, tuple[str, SlotGrant]] = {}

    @rule(peer=st.sampled_from(PEERS))
    def join(self, peer: str) -> None:
        self.pool.add_peer(peer)
        self.peers.add(peer)

    @rule(target=grants, peer=st.sampled_from(PEERS), n=st.integers(0, 12))
    def grant(self, peer: str, n: int) -> object:
        if peer not in self.peers:
            return multiple()
        granted = self.pool.grant(peer, n)
        assert len(granted) <= n
        for grant in granted:
            assert grant.slot not in self.writable
            self.writable[grant.slot] = (peer, grant)
        return multiple(*[(peer, grant) for grant in granted])

    @rule(claim=consumes(grants), thief=st.sampled_from(PEERS))
    def use(self, claim: tuple[str, SlotGrant], thief: str) -> None:
        peer, grant = claim
        valid = self.writable.get(grant.slot) == claim
        if thief != peer:
            assert self.pool.use(grant.slot, grant.generation, thief) is not SlotUse.OK
        assert (self.pool.use(grant.slot, grant.generation, peer) is SlotUse.OK) == valid
        assert self.pool.use(grant.slot, grant.generation, peer) is not SlotUse.OK
        if valid:
            del self.writable[grant.slot]

    @rule(peer=st.sampled_from(PEERS), proof=st.booleans())
    def revoke(self, peer: str, proof: bool) -> None:
        held = [slot for slot, (owner, _) in self.writable.items() if owner == peer]
        assert self.pool.revoke_peer(peer, proof) == len(held)
        self.peers.discard(peer)
        if proof:
            for slot in held:
                del self.writable[slot]

    @rule(peer=st.sampled_from(PEERS))
    def prove(self, peer: str) -> None:
        if peer not in self.peers:
            self.pool.prove_dead(peer)
            self.writable = {slot: claim for slot, claim in self.writable.items() if claim[0] != peer}

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.total == 10
        assert counts.free == 10 - len(self.writable)

    @rule(peer=st.sampled_from(PEERS), target=grants)
    def grant_one(self, peer: str) -> object:
        """Who can write and holds nothing is granted a slot, whatever the shares of the others."""
        if peer not in self.peers or any(owner == peer for owner, _ in self.writable.values()):
            return multiple()
        expected = self.pool.can_write(peer)
        granted = self.pool.grant(peer, 1)
        assert len(granted) == expected
        for grant in granted:
            self.writable[grant.slot] = (peer, grant)
        return multiple(*[(peer, grant) for grant in granted])


StagingMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestStagingMachine = StagingMachine.TestCase


def test_a_refused_claim_says_why() -> None:
    pool = StagingPool(4)
    pool.add_peer("a")
    [first] = pool.grant("a", 1)
    assert pool.use(first.slot, first.generation + 1, "a") is SlotUse.FOREIGN
    assert pool.use(99, 1, "a") is SlotUse.FOREIGN
    assert pool.use(first.slot, first.generation, "b") is SlotUse.FOREIGN
    assert pool.use(first.slot, first.generation, "a") is SlotUse.OK
    assert pool.use(first.slot, first.generation, "a") is SlotUse.DUPLICATE
    regranted = [grant for _ in range(4) for grant in pool.grant("a", 1) if grant.slot == first.slot]
    assert regranted == [SlotGrant(first.slot, first.generation + 1)]
    assert pool.use(first.slot, first.generation, "a") is SlotUse.LATE


def test_one_peer_cannot_take_all_and_newcomers_need_not_wait() -> None:
    pool = StagingPool(16)
    pool.add_peer("greedy")
    assert len(pool.grant("greedy", 100)) == 12
    for newcomer in ("b", "c"):
        pool.add_peer(newcomer)
        assert len(pool.grant(newcomer, 100)) == 2
    assert pool.counts().free == 0


def test_slots_move_to_whoever_is_below_its_share() -> None:
    pool = StagingPool(16)
    pool.add_peer("first")
    held = pool.grant("first", 100)
    pool.add_peer("second")
    pool.grant("second", 100)
    for grant in held:
        assert pool.use(grant.slot, grant.generation, "first") is SlotUse.OK
        pool.grant("first", 100)
        pool.grant("second", 100)
    assert pool.held_by("second") == pool.share() == 6
    assert pool.held_by("first") <= 6


def test_a_message_out_of_a_quarantined_slot_frees_it() -> None:
    pool = StagingPool(4)
    pool.add_peer("a")
    [grant, _] = pool.grant("a", 2)
    pool.revoke_peer("a", proof=False)
    assert pool.counts().quarantined == 2
    assert pool.use(grant.slot, grant.generation, "a") is SlotUse.OK
    assert pool.counts().quarantined == 1
    assert pool.prove_dead("a") == 1
    assert pool.counts().free == 4


def test_a_stuck_peer_leaves_send_buffers_to_the_others() -> None:
    buffers = SendBuffers(4)
    taken = []
    while buffers.available("stuck", num_peers=2):
        taken.append(buffers.acquire("stuck"))
    assert len(taken) == 2
    assert buffers.available("other", num_peers=2)
    for buffer in taken:
        buffers.release("stuck", buffer)
    assert buffers.in_use == 0
