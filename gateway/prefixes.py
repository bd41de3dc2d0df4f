"""Which worker probably holds the KV of which prefix: a guess from what was routed where.

Workers evict on their own, so this is a hint for the router and nothing else; what is really cached, the worker finds
out. Block hashes are taken at a routing block size of our own, whatever the workers' block sizes are.
"""

from collections import OrderedDict
from collections.abc import Sequence

from common.hashing import BlockHash, block_hashes

#: Tokens in a routing block: coarse, as a hit shorter than this does not change a decision.
ROUTING_BLOCK = 64
#: About 4 million tokens and 20 MB for each worker.
MAX_BLOCKS = 65_536


def routing_hashes(token_ids: Sequence[int], salt: str) -> list[BlockHash]:
    """Hashes of the full routing blocks of a prompt."""
    return block_hashes(token_ids, ROUTING_BLOCK, salt)


class _Holder:
    """Blocks of one incarnation of one worker, least recently used first."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.blocks: OrderedDict[BlockHash, None] = OrderedDict()


class PrefixIndex:
    """Per worker, the prefixes that were sent to it; bounded, least recently used out first."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        """`max_blocks`: bound for each worker."""
        self._max_blocks = max_blocks
        self._holders: dict[str, _Holder] = {}

    def record(self, worker_id: str, incarnation: str, hashes: Sequence[BlockHash]) -> None:
        """The worker computes or has received the KV of these blocks. A new incarnation starts empty."""
        holder = self._holders.get(worker_id)
        if holder is None or holder.incarnation != incarnation:
            holder = self._holders[worker_id] = _Holder(incarnation)
        # Last block first: the ends of chains must be evicted before their beginnings.
        for block in reversed(hashes):
            holder.blocks[block] = None
            holder.blocks.move_to_end(block)
        while len(holder.blocks) > self._max_blocks:
            holder.blocks.popitem(last=False)

    def overlap(self, worker_id: str, incarnation: str, hashes: Sequence[BlockHash]) -> int:
        """Tokens of the longest recorded prefix."""
        holder = self._holders.get(worker_id)
        if holder is None or holder.incarnation != incarnation:
            return 0
        # Chained hashes: a block that is held implies its predecessors, but for eviction.
        matched = 0
        for block in hashes:
            if block not in holder.blocks:
                break
            matched += 1
        return matched * ROUTING_BLOCK

    def drop(self, worker_id: str) -> None:
        """The worker is gone."""
        self._holders.pop(worker_id, None)
