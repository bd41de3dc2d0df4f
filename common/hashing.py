"""Chained hashes of token blocks: how gateway, prefill and decode name the same prefix.

Pure bytes in, bytes out: stable across processes, machines and Python versions, and free of torch, so that
the gateway can route by them. Knows nothing of pools or of who holds which block.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType, Self

import numpy as np

#: 16 bytes that name a full block *and everything before it*.
BlockHash = NewType("BlockHash", bytes)

_DIGEST_BYTES = 16
_TOKEN_BYTES = 4


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "", *, adapter: str = "") -> list[BlockHash]:
    """Hash each full block of `token_ids`; a partial block at the end has no hash.

    h[i] = H(h[i-1], tokens of block i) and h[-1] = H(salt, adapter, block_size), so that equal hashes mean
    equal prefixes within one salt (a tenant, say), adapter and block size, and nothing is shared across them.
    Token ids are in [0, 2**32).
    """
    return _chain(_root(block_size, salt, adapter), token_ids, block_size)


class BlockHasher:
    """The hashes of one growing sequence; each token is hashed once, however it arrives."""

    def __init__(self, block_size: int, salt: str = "", adapter: str = "") -> None:
        self.block_size = block_size
        self._last = _root(block_size, salt, adapter)
        self._hashes: list[BlockHash] = []
        #: Tokens after the last full block; shorter than a block.
        self._tail: list[int] = []

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """One per full block so far; a live view that `extend` lengthens."""
        return self._hashes

    @property
    def num_tokens(self) -> int:
        return len(self._hashes) * self.block_size + len(self._tail)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self._tail.extend(token_ids)
        num_full = len(self._tail) - len(self._tail) % self.block_size
        if num_full:
            self._hashes += _chain(self._last, self._tail[:num_full], self.block_size)
            self._last = self._hashes[-1]
            del self._tail[:num_full]

    def copy(self) -> Self:
        """An independent hasher at the same point, for a sequence that forks (n > 1)."""
        twin = object.__new__(type(self))
        twin.block_size = self.block_size
        twin._last = self._last
        twin._hashes = list(self._hashes)
        twin._tail = list(self._tail)
        return twin


def _root(block_size: int, salt: str, adapter: str) -> BlockHash:
    """Hash of nothing yet. Fields are length-prefixed, so ("ab", "c") and ("a", "bc") differ."""
    assert block_size > 0, f"block size {block_size}"
    state = blake2b(block_size.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    for field in (salt.encode(), adapter.encode()):
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return BlockHash(state.digest())


def _chain(previous: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    data = np.asarray(token_ids, dtype="<u4").tobytes()
    stride = block_size * _TOKEN_BYTES
    hashes = []
    for start in range(0, len(data) - stride + 1, stride):
        digest = blake2b(previous + data[start : start + stride], digest_size=_DIGEST_BYTES).digest()
        previous = BlockHash(digest)
        hashes.append(previous)
    return hashes
