"""Halves of surrogate pairs in tokens' bytes, which are no UTF-8.

The library takes them for characters: where it allows any character it allows `ED` and, behind it, `A0` to `BF`, which
would be read as three replacement characters. Knows no grammar.
"""

import re
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

_LEAD = b"\xed"
#: What follows it in a half of a pair; in characters that is `80` to `9F`.
_HALF = re.compile(rb"[\xa0-\xbf]")
_WHOLE = re.compile(rb"\xed[\xa0-\xbf]")


def has_surrogate(token: bytes) -> bool:
    """Whether it holds one by itself: then it can stand in no text."""
    return _WHOLE.search(token) is not None


class SurrogateRule:
    """Which tokens may not follow which, so that none comes about where two meet. Immutable."""

    def __init__(self, openers: frozenset[int], halves: frozenset[int], vocab_size: int) -> None:
        """`openers` end with the lead byte, `halves` begin with what must not follow it."""
        self._openers = openers
        self._halves = halves
        bits = np.ones(32 * -(-vocab_size // 32), dtype=np.uint8)
        bits[list(halves)] = 0
        #: int32 [ceil(vocab / 32)], a bit per token that may follow an opener.
        self.allowed: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)

    @classmethod
    def of(cls, tokens: Sequence[bytes], vocab_size: int) -> Self:
        openers = frozenset(i for i, token in enumerate(tokens) if token.endswith(_LEAD))
        halves = frozenset(i for i, token in enumerate(tokens) if _HALF.match(token))
        return cls(openers, halves, vocab_size)

    def opens(self, token_id: int) -> bool:
        return token_id in self._openers

    def completes(self, token_id: int) -> bool:
        """It must not follow a token that opens."""
        return token_id in self._halves
