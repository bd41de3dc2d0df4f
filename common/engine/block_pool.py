"""Which KV blocks are free, cached or owned; ids only, no tensors.

A block is *free* (reference count 0, content meaningless), *cached* (0, but indexed by the hash of its content)
or *owned* (1 or more). Owned blocks may be indexed too, and then are shared by whoever matches them. Cached
blocks are reused by content (`match` + `acquire`) or evicted for their space, least recently used first.

Several owned blocks may hold the same content, computed at the same time: one of them is *found*, the others are its
*copies*. When the found one has no owner any more a copy is found in its stead, and the block that nobody owns is free:
content stays in the cache as long as any block holds it, and takes the space of one block where nobody owns it.

The pool belongs to one engine thread and knows nothing of requests.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.hashing import BlockHash


class BlockCounts(NamedTuple):
    """A snapshot of the pool; free + cached + owned == total."""

    total: int
    free: int
    cached: int
    owned: int


class _Block:
    """One block's state.

    `block_hash` is set while the block is found by it or is a copy of the one that is; `older` and `newer` exactly
    while the block is in the LRU list.
    """

    __slots__ = ("block_hash", "block_id", "newer", "older", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.older: _Block | None = None
        self.newer: _Block | None = None

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, refs={self.ref_count}, hash={digest})"


class _LruList:
    """Cached blocks, oldest first, linked through the blocks themselves.

    A hit takes a block out of the middle, which an OrderedDict could do as well; the links cost no hashing and
    allocate nothing. One sentinel closes the ring, so that no operation has an edge case.
    """

    __slots__ = ("_ring", "size")

    def __init__(self) -> None:
        self._ring = _Block(-1)
        self._ring.older = self._ring.newer = self._ring
        self.size = 0

    def append(self, block: _Block) -> None:
        """Add `block` as the most recently used."""
        newest = self._ring.older
        assert block.older is None and newest is not None, f"{block} is already in the list"
        block.older, block.newer = newest, self._ring
        newest.newer = self._ring.older = block
        self.size += 1

    def remove(self, block: _Block) -> None:
        older, newer = block.older, block.newer
        assert older is not None and newer is not None, f"{block} is not in the list"
        older.newer, newer.older = newer, older
        block.older = block.newer = None
        self.size -= 1

    def pop_oldest(self) -> _Block:
        oldest = self._ring.newer
        assert oldest is not None and oldest is not self._ring, "no cached block to evict"
        self.remove(oldest)
        return oldest

    def block_ids(self) -> list[int]:
        """Ids, oldest first; O(size), for checks."""
        ids = []
        block = self._ring.newer
        while block is not None and block is not self._ring:
            assert block.newer is not None and block.newer.older is block, f"broken link at {block}"
            ids.append(block.block_id)
            block = block.newer
        return ids


class BlockPool:
    """All blocks of one KV cache. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0, f"{num_blocks} blocks of {block_size} tokens"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [_Block(block_id) for block_id in range(num_blocks)]
        #: A stack; low ids are handed out first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = _LruList()
        #: The block that is found for a content.
        self._index: dict[BlockHash, _Block] = {}
        #: Other owned blocks with that content, by id, the oldest first; no entry is empty.
        self._copies: dict[BlockHash, dict[int, _Block]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._cached.size

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self.num_free + self.num_cached

    def counts(self) -> BlockCounts:
        return BlockCounts(self.num_blocks, self.num_free, self.num_cached, self.num_owned)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, each with one reference; None, and nothing changed, if there are not so many.

        Free blocks go first; then cached ones are evicted, least recently used first. Acquire what `match`
        found before calling this or `index`, or it may be gone.
        """
        assert count >= 0, f"allocate {count} blocks"
        if count > self.num_available:
            return None
        return [self._take() for _ in range(count)]

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Ids of the blocks that hold the longest indexed prefix of `hashes`; changes nothing."""
        found = []
        for block_hash in hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            found.append(block.block_id)
        return found

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; all are cached or owned."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                assert block.block_hash is not None, f"acquired {block}, which is free"
                self._cached.remove(block)
            block.ref_count += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference from each block of a sequence, given in sequence order.

        At 0 a block is cached if it is the only one with its content, else free. Of one sequence the tail is
        evicted before the head, since a cached block without those before it can never be matched.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"released {block}, which nobody owns"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._retire(block)

    def index(self, block_id: int, block_hash: BlockHash) -> None:
        """Publish an owned, full block for reuse under the hash of its content.

        If another owned block holds that content it stays the one that is found, and this one is its copy; a cached
        one gives way and is free.
        """
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"indexed {block}, which nobody owns"
        assert block.block_hash in (None, block_hash), f"indexed {block} again, as {block_hash.hex()}"
        if block.block_hash is not None:
            return
        block.block_hash = block_hash
        found = self._index.setdefault(block_hash, block)
        if found is block:
            return
        self._copies.setdefault(block_hash, {})[block_id] = block
        if found.ref_count == 0:
            self._cached.remove(found)
            self._retire(found)

    def clear_cache(self) -> None:
        """Forget all content: cached blocks become free, owned ones stay with their owners but unindexed."""
        for block in (*self._index.values(), *(copy for copies in self._copies.values() for copy in copies.values())):
            block.block_hash = None
        self._index.clear()
        self._copies.clear()
        while self._cached.size:
            self._free.append(self._cached.pop_oldest().block_id)

    def check(self) -> None:
        """Assert every invariant; O(num_blocks)."""
        cached = self._cached.block_ids()
        assert len(cached) == self._cached.size, f"{len(cached)} linked, {self._cached.size} counted as cached"
        owned = [block.block_id for block in self._blocks if block.ref_count > 0]
        everything = sorted([*self._free, *cached, *owned])
        assert everything == list(range(self.num_blocks)), (
            f"free {len(self._free)} + cached {len(cached)} + owned {len(owned)} is not each of "
            f"{self.num_blocks} blocks once"
        )
        for block_id in self._free:
            assert self._blocks[block_id].block_hash is None, f"free, yet indexed: {self._blocks[block_id]}"
        for block_id in cached:
            assert self._blocks[block_id].block_hash is not None, f"cached, not indexed: {self._blocks[block_id]}"
        hashed = [block for block in self._blocks if block.block_hash is not None]
        num_copies = sum(map(len, self._copies.values()))
        assert len(hashed) == len(self._index) + num_copies, (
            f"{len(hashed)} blocks with a hash, {len(self._index)} in the index, {num_copies} copies"
        )
        for block_hash, block in self._index.items():
            assert block.block_hash == block_hash, f"{block} is indexed as {block_hash.hex()}"
        for block_hash, copies in self._copies.items():
            group = [self._index[block_hash], *copies.values()]
            assert len({block.block_id for block in group}) == len(group) > 1, f"copies of one another: {group}"
            assert all(block.block_hash == block_hash and block.ref_count > 0 for block in group), (
                f"{group} as {block_hash.hex()}: a copy, or what it is a copy of, is something else or has no owner"
            )

    def _take(self) -> int:
        if self._free:
            block = self._blocks[self._free.pop()]
        else:
            block = self._cached.pop_oldest()
            self._forget(block)
        block.ref_count = 1
        return block.block_id

    def _retire(self, block: _Block) -> None:
        """Nobody owns the block any more."""
        if block.block_hash is not None and block.block_hash not in self._copies:
            self._cached.append(block)
            return
        if block.block_hash is not None:
            self._forget(block)
        self._free.append(block.block_id)

    def _forget(self, block: _Block) -> None:
        """The block's content is no longer looked for in it; if it was the one that is found, a copy is from now on."""
        block_hash = block.block_hash
        assert block_hash is not None, f"forgotten without a hash: {block}"
        block.block_hash = None
        copies = self._copies.get(block_hash, {})
        if self._index[block_hash] is not block:
            del copies[block.block_id]
        elif copies:
            self._index[block_hash] = copies.pop(next(iter(copies)))
        else:
            del self._index[block_hash]
        if not copies:
            self._copies.pop(block_hash, None)
