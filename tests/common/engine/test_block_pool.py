"""The block pool: exact behaviour by example, then everything against a naive model."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.block_pool import BlockCounts, BlockPool
from common.hashing import BlockHash, block_hashes

H = block_hashes(range(64), 4)


def allocated(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cached(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """Leave a sequence with these hashes in the cache."""
    blocks = allocated(pool, len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.index(block, block_hash)
    pool.release(blocks)
    return blocks


def test_a_new_pool_is_all_free() -> None:
    pool = BlockPool(4, 16)
    assert pool.counts() == BlockCounts(total=4, free=4, cached=0, owned=0)
    assert (pool.num_blocks, pool.block_size, pool.num_available) == (4, 16, 4)
    pool.check()


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    cached(pool, H[:2])
    assert pool.allocate(5) is None
    assert pool.counts() == BlockCounts(total=4, free=2, cached=2, owned=0)
    assert pool.match(H[:2]) == [0, 1]
    assert pool.allocate(0) == []


def test_blocks_come_with_one_reference_and_go_back_free_if_not_indexed() -> None:
    pool = BlockPool(2, 16)
    blocks = allocated(pool, 2)
    assert [pool.ref_count(b) for b in blocks] == [1, 1]
    pool.release(blocks)
    assert pool.counts() == BlockCounts(total=2, free=2, cached=0, owned=0)


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, 16)
    cached(pool, H[:2])
    allocated(pool, 2)
    assert pool.match(H[:2]) == [0, 1]


def test_eviction_takes_the_tail_of_the_least_recently_used_sequence_first() -> None:
    pool = BlockPool(5, 16)
    old = cached(pool, H[:3])
    new = cached(pool, H[5:7])
    survivors = []
    for _ in range(5):
        allocated(pool, 1)
        survivors.append((len(pool.match(H[:3])), len(pool.match(H[5:7]))))
        pool.check()
    assert survivors == [(2, 2), (1, 2), (0, 2), (0, 1), (0, 0)]
    assert set(old).isdisjoint(new)


def test_a_hit_makes_a_prefix_recently_used() -> None:
    pool = BlockPool(4, 16)
    cached(pool, H[:2])
    cached(pool, H[5:7])
    pool.acquire(pool.match(H[:2]))
    pool.release(pool.match(H[:2]))
    allocated(pool, 2)
    assert (len(pool.match(H[:2])), len(pool.match(H[5:7]))) == (2, 0)


def test_an_acquired_prefix_is_never_evicted() -> None:
    pool = BlockPool(4, 16)
    cached(pool, H[:3])
    pool.acquire(pool.match(H[:2]))
    assert pool.counts() == BlockCounts(total=4, free=1, cached=1, owned=2)
    allocated(pool, 2)
    assert pool.allocate(1) is None
    assert pool.match(H[:3]) == [0, 1]


def test_owners_share_a_block_until_the_last_one_leaves() -> None:
    pool = BlockPool(2, 16)
    [block] = allocated(pool, 1)
    pool.acquire([block, block])
    pool.release([block])
    pool.release([block, block])
    assert pool.counts() == BlockCounts(total=2, free=2, cached=0, owned=0)


def test_a_block_can_be_matched_while_it_is_owned() -> None:
    pool = BlockPool(2, 16)
    blocks = allocated(pool, 1)
    pool.index(blocks[0], H[0])
    assert pool.match(H[:2]) == blocks


def test_match_stops_at_the_first_gap() -> None:
    pool = BlockPool(4, 16)
    cached(pool, [H[0], H[2]])
    assert pool.match(H[:3]) == [0]
    assert pool.match(H[1:3]) == []


def copies(pool: BlockPool, count: int) -> list[int]:
    """Owned blocks with the content H[0]; the first is the one that is found."""
    blocks = allocated(pool, count)
    for block in (*blocks, *blocks):
        pool.index(block, H[0])
    pool.check()
    assert pool.match(H[:1]) == blocks[:1]
    return blocks


def test_a_copy_that_nobody_owns_is_free() -> None:
    pool = BlockPool(4, 16)
    first, second = copies(pool, 2)
    pool.release([second])
    assert pool.match(H[:1]) == [first]
    assert pool.counts() == BlockCounts(total=4, free=3, cached=0, owned=1)
    pool.check()


def test_a_copy_is_found_when_the_first_one_has_lost_its_owner() -> None:
    pool = BlockPool(4, 16)
    blocks = copies(pool, 3)
    for gone, block in enumerate(blocks, 1):
        assert pool.match(H[:1]) == [block]
        pool.release([block])
        pool.check()
        assert pool.counts() == BlockCounts(total=4, free=1 + min(gone, 2), cached=gone // 3, owned=3 - gone)
    assert pool.match(H[:1]) == blocks[-1:]


def test_a_cached_block_gives_way_to_an_owned_one_with_its_content() -> None:
    pool = BlockPool(4, 16)
    cached(pool, H[:2])
    late, other = allocated(pool, 2)
    pool.index(late, H[0])
    assert pool.match(H[:2]) == [late, 1]
    assert pool.counts() == BlockCounts(total=4, free=1, cached=1, owned=2)
    pool.check()
    pool.release([late, other])
    assert pool.match(H[:2]) == [late, 1]


def test_a_copy_has_owners_of_its_own() -> None:
    pool = BlockPool(4, 16)
    first, second = copies(pool, 2)
    pool.acquire([second])
    pool.release([second])
    assert pool.counts().owned == 2
    pool.release([first])
    assert pool.match(H[:1]) == [second]
    pool.check()


def test_clearing_the_cache_frees_cached_blocks_and_unindexes_owned_ones() -> None:
    pool = BlockPool(4, 16)
    cached(pool, H[:2])
    [owned] = allocated(pool, 1)
    pool.index(owned, H[3])
    [copy] = allocated(pool, 1)
    pool.index(copy, H[3])
    pool.clear_cache()
    assert pool.counts() == BlockCounts(total=4, free=2, cached=0, owned=2)
    assert pool.match([H[3]]) == []
    pool.check()
    pool.release([owned, copy])
    assert pool.num_free == 4


def test_misuse_is_an_assertion_that_names_the_block() -> None:
    pool = BlockPool(4, 16)
    with pytest.raises(AssertionError, match=r"acquired Block\(2.*free"):
        pool.acquire([2])
    with pytest.raises(AssertionError, match=r"released Block\(1"):
        pool.release([1])
    with pytest.raises(AssertionError, match=r"indexed Block\(0"):
        pool.index(0, H[0])
    [block] = allocated(pool, 1)
    pool.index(block, H[0])
    with pytest.raises(AssertionError, match="again"):
        pool.index(block, H[1])
    pool.check()


@pytest.mark.parametrize("damage", ["leak", "double", "hash", "index", "copy of none", "forgotten copy"])
def test_check_sees_damage(damage: str) -> None:
    pool = BlockPool(6, 16)
    blocks = cached(pool, H[1:3])
    _, copy = copies(pool, 2)
    if damage == "leak":
        pool._free.pop()
    elif damage == "double":
        pool._free.append(blocks[0])
    elif damage == "hash":
        pool._blocks[pool._free[0]].block_hash = H[5]
    elif damage == "index":
        del pool._index[H[1]]
    elif damage == "copy of none":
        pool._copies[H[1]] = {copy: pool._blocks[copy]}
    else:
        del pool._copies[H[0]]
    with pytest.raises(AssertionError):
        pool.check()


NUM_BLOCKS = 6


class PoolAgainstModel(RuleBasedStateMachine):
    """Sequences come, publish, share, fork and go; two dicts and a list say what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.refs: Counter[int] = Counter()
        #: content -> blocks that hold it, in the order of publishing; the first is found.
        self.holders: dict[BlockHash, list[int]] = {}
        #: Cached blocks, next to be evicted first.
        self.lru: list[int] = []
        self.sequences: list[list[int]] = []

    def hash_of(self, block: int) -> BlockHash | None:
        return next((h for h, blocks in self.holders.items() if block in blocks), None)

    def forget(self, block: int) -> None:
        content = self.hash_of(block)
        assert content is not None
        self.holders[content].remove(block)
        if not self.holders[content]:
            del self.holders[content]

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = [b for b in range(NUM_BLOCKS) if not self.refs[b] and b not in self.lru]
        blocks = self.pool.allocate(count)
        if count > len(free) + len(self.lru):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        evicted = self.lru[: max(0, count - len(free))]
        assert set(blocks) <= {*free, *evicted}
        assert set(evicted) <= set(blocks)
        for block in evicted:
            self.lru.remove(block)
            self.forget(block)
        self.refs.update(blocks)
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.refs[block] -= 1
            content = self.hash_of(block)
            if not self.refs[block] and content is not None:
                if self.holders[content] == [block]:
                    self.lru.append(block)
                else:
                    self.forget(block)

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data(), content=st.sampled_from(H[:8]))
    def publish(self, data: st.DataObject, content: BlockHash) -> None:
        block = data.draw(st.sampled_from([b for s in self.sequences for b in s]))
        if self.hash_of(block) in (None, content):
            self.pool.index(block, content)
            for old in [b for b in self.holders.get(content, []) if not self.refs[b]]:
                self.lru.remove(old)
                self.forget(old)
            if block not in self.holders.setdefault(content, []):
                self.holders[content].append(block)

    @rule(contents=st.lists(st.sampled_from(H[:8]), max_size=4))
    def match_and_acquire(self, contents: list[BlockHash]) -> None:
        expected = []
        for content in contents:
            if content not in self.holders:
                break
            expected.append(self.holders[content][0])
        assert self.pool.match(contents) == expected
        self.pool.acquire(expected)
        self.refs.update(expected)
        self.lru = [b for b in self.lru if b not in expected]
        self.sequences.append(expected)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.sequences)))
        self.pool.acquire(blocks)
        self.refs.update(blocks)
        self.sequences.append(blocks)

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        self.holders.clear()
        self.lru.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert [self.pool.ref_count(b) for b in range(NUM_BLOCKS)] == [self.refs[b] for b in range(NUM_BLOCKS)]
        owned = sum(self.refs[b] > 0 for b in range(NUM_BLOCKS))
        free = NUM_BLOCKS - owned - len(self.lru)
        assert self.pool.counts() == BlockCounts(NUM_BLOCKS, free, len(self.lru), owned)
        assert all(self.pool.match([content]) == blocks[:1] for content, blocks in self.holders.items())

    def teardown(self) -> None:
        for blocks in self.sequences:
            self.pool.release(blocks)
        assert self.pool.num_owned == 0
        self.pool.check()


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=150, stateful_step_count=40)
