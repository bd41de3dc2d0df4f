"""The blocks of one sequence: which it has, how much of them is computed, which are published for reuse.

One owner per table, and it must call `release` on every path; the pool counts. Knows no scheduling.
"""

from collections.abc import Callable, Sequence

from common.engine.block_pool import BlockPool
from common.engine.prefix import usable_prefix
from common.hashing import BlockHash, BlockHasher


class BlockTable:
    """Blocks of a sequence, in order.

    Attributes:
        blocks: block ids; position p lies in blocks[p // block_size].
        num_computed: tokens whose KV is final, from position 0; always <= len(blocks) * block_size.
        num_cached: how many of them came from the prefix cache.
    """

    def __init__(self, pool: BlockPool, salt: str) -> None:
        self._pool = pool
        self._salt = salt
        self._hasher = BlockHasher(pool.block_size, salt)
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_cached = 0

    def adopt_prefix(self, token_ids: Sequence[int], hashes: Sequence[BlockHash]) -> int:
        """Pin the cached blocks of the longest known prefix of `token_ids`; return the tokens they hold.

        `hashes` are those of the full blocks of `token_ids`. The last token is never taken from the cache,
        because its logits are wanted. Only for an empty table.
        """
        assert not self.blocks, f"a table of {len(self.blocks)} blocks cannot adopt a prefix"
        matched = self._pool.match(hashes)
        num_tokens = usable_prefix(len(token_ids), len(matched), self._pool.block_size)
        self.blocks = list(matched[: num_tokens // self._pool.block_size])
        self._pool.acquire(self.blocks)
        self._hasher.extend(token_ids[:num_tokens])
        self.num_computed = self.num_cached = num_tokens
        return num_tokens

    def missing(self, num_tokens: int) -> int:
        """Blocks to be added until `num_tokens` tokens fit."""
        return max(0, -(-num_tokens // self._pool.block_size) - len(self.blocks))

    def reserve(self, num_tokens: int) -> bool:
        """Add blocks until `num_tokens` tokens fit. False, and nothing changed, if the pool has too few."""
        count = self.missing(num_tokens)
        if count == 0:
            return True
        blocks = self._pool.allocate(count)
        if blocks is None:
            return False
        self.blocks.extend(blocks)
        return True

    def commit(self, token_ids: Sequence[int]) -> None:
        """The KV of the next `token_ids` is final: count it, and publish the blocks that became full."""
        first_open = self.num_computed // self._pool.block_size
        self._hasher.extend(token_ids)
        self.num_computed += len(token_ids)
        assert self.num_computed <= len(self.blocks) * self._pool.block_size, "more tokens than blocks hold"
        hashes = self._hasher.hashes
        for index in range(first_open, len(hashes)):
            self._pool.index(self.blocks[index], hashes[index])

    def slots(self, first: int, end: int) -> list[int]:
        """Flat KV slots (block * block_size + offset) of positions [first, end)."""
        size = self._pool.block_size
        return [self.blocks[p // size] * size + p % size for p in range(first, end)]

    def fork(self, token_ids: Sequence[int], copy_block: Callable[[int, int], None]) -> "BlockTable | None":
        """A second table over the same computed tokens (`token_ids`, all of them): full blocks are shared, the
        partial one is copied by `copy_block(source, target)`. None if there is no block for the copy."""
        assert len(token_ids) == self.num_computed, f"{len(token_ids)} tokens given, {self.num_computed} computed"
        full = self.num_computed // self._pool.block_size
        twin = BlockTable(self._pool, self._salt)
        if self.num_computed % self._pool.block_size:
            copy = self._pool.allocate(1)
            if copy is None:
                return None
            copy_block(self.blocks[full], copy[0])
        else:
            copy = []
        shared = self.blocks[:full]
        self._pool.acquire(shared)
        twin.blocks = shared + copy
        twin.num_computed, twin.num_cached = self.num_computed, self.num_cached
        twin._hasher.extend(token_ids)
        return twin

    def release(self) -> None:
        """Give every block back (published ones stay cached). The table is empty afterwards; idempotent."""
        blocks, self.blocks = self.blocks, []
        self._pool.release(blocks)
        self._hasher = BlockHasher(self._pool.block_size, self._salt)
        self.num_computed = self.num_cached = 0
