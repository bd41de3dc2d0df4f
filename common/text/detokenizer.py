"""Turns one choice's tokens into text as they come. Knows no stop strings and no other choice.

Bytes are decoded, not tokens: a character whose bytes lie in several tokens comes out whole with the last of them,
a leading space is kept, and the work per token does not grow with the text.
"""

import codecs
from collections.abc import Set

from common.text.tokenizer import Tokenizer


class Detokenizer:
    """Joined results of `push` and the final `flush` equal `Tokenizer.decode` of all tokens that are not skipped."""

    def __init__(self, tokenizer: Tokenizer, *, skipped_ids: Set[int] = frozenset()) -> None:
        """`skipped_ids`: tokens that add no text (usually `tokenizer.special_ids`)."""
        self._tokenizer = tokenizer
        self._skipped = skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; an unfinished character waits for the next ones.

        Bytes that can no longer become a character come out as U+FFFD.
        """
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)
