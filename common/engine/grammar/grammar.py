"""A compiled grammar, and one choice's place in it. Wraps xgrammar; knows nothing of requests, batches or sampling.

What a grammar allows is a pure function of (grammar, tokens accepted so far): after a fail-over or preemption the same
tokens, accepted anew, lead to the same place.
"""

import hashlib
import time

import numpy as np
import xgrammar
from numpy.typing import NDArray

from common.engine.grammar.surrogates import SurrogateRule

#: Bits of allowed tokens, token i in bit i % 32 of word i // 32; ceil(vocab / 32) words.
Words = NDArray[np.int32]


class Grammar:
    """A grammar compiled for one vocabulary. Immutable; shared by threads and by all choices of all its requests."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, serialized: bytes, surrogates: SurrogateRule) -> None:
        """`serialized`: the same grammar as bytes, see `Vocabulary.load_grammar`."""
        self._compiled = compiled
        self._serialized = serialized
        #: SHA-256 of `serialized`.
        self.digest = hashlib.sha256(serialized).digest()
        #: Of the vocabulary.
        self.surrogates = surrogates
        vocabulary = compiled.tokenizer_info
        self.vocab_size: int = vocabulary.vocab_size
        self.end_token_ids: tuple[int, ...] = tuple(vocabulary.stop_token_ids)
        #: Memory that it takes.
        self.num_bytes: int = compiled.memory_size_bytes + len(serialized)

    @property
    def serialized(self) -> bytes:
        """What another worker with the same tokenizer needs to have this grammar."""
        return self._serialized

    @property
    def num_words(self) -> int:
        """Length of a mask."""
        return -(-self.vocab_size // 32)

    def start(self) -> "GrammarState":
        """A new place at the grammar's beginning."""
        return GrammarState(self, xgrammar.GrammarMatcher(self._compiled))


class GrammarState:
    """How far one choice's output has come in its grammar. Made by `Grammar.start`; used by one thread at a time.

    Some grammars lead to places from where no token of the vocabulary goes on and which are no end either (a character
    that no token spells, a rule that only ever calls itself). There, end tokens are allowed: the choice ends, with the
    output that it has.
    """

    def __init__(self, grammar: Grammar, matcher: xgrammar.GrammarMatcher) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._terminated = False
        self._seconds = 0.0
        #: Tokens that were pushed and not accepted yet.
        self._pushed: list[int] = []
        #: The mask of the token that comes next, in a tuple, once it is computed.
        self._mask: tuple[Words | None] | None = None
        #: Processor time that the last mask took, with the tokens before it.
        self.mask_seconds = 0.0
        #: For whoever computes masks: steps for which the present one was late.
        self.misses = 0
        #: The last token ends where half of a surrogate pair could follow.
        self._surrogate_open = False
        #: The last `fill` found nothing that could follow.
        self.stuck = False

    @property
    def num_words(self) -> int:
        """Length of a mask."""
        return self._grammar.num_words

    @property
    def terminated(self) -> bool:
        """The last token is an end token: nothing more may follow, `accept`, `push` and masks must not be asked for."""
        return self._terminated or (bool(self._pushed) and self._pushed[-1] in self._grammar.end_token_ids)

    def push(self, token_id: int) -> None:
        """Go on by one token that the last mask allows. It is accepted with the next mask: in an ambiguous grammar that
        takes long, too."""
        assert not self.terminated, f"token {token_id} after the end of the grammar"
        self._pushed.append(token_id)
        self._mask = None

    def next_mask(self) -> Words | None:
        """Which tokens may come next, see `fill`; None if all may. Computed once, and kept until the next token."""
        if self._mask is None:
            before = self._seconds
            while self._pushed:
                # Forgotten only then: what goes wrong for a mask that nobody waits for any more does so again.
                self.accept(self._pushed[0])
                del self._pushed[0]
            words = np.empty(self.num_words, dtype=np.int32)
            self._mask = (words if self.fill(words) else None,)
            self.mask_seconds = self._seconds - before
        return self._mask[0]

    def accept(self, token_id: int) -> None:
        """Go on by one token that was drawn here. One that the grammar does not allow is an assertion."""
        assert not self._terminated, f"token {token_id} after the end of the grammar"
        assert self.try_accept(token_id), f"the grammar does not allow token {token_id} here"

    def try_accept(self, token_id: int) -> bool:
        """Go on by one token that came from elsewhere. False, and nothing changed, if it may not come next."""
        started = time.thread_time()
        accepted = self._try_accept(token_id)
        self._mask = None
        self._seconds += time.thread_time() - started
        return accepted

    def _try_accept(self, token_id: int) -> bool:
        surrogates = self._grammar.surrogates
        if self._terminated or (self._surrogate_open and surrogates.completes(token_id)):
            return False
        is_end = token_id in self._grammar.end_token_ids
        if not self._matcher.accept_token(token_id) and not (is_end and self._is_stuck()):
            return False
        self._terminated = is_end
        self._surrogate_open = surrogates.opens(token_id)
        return True

    def fill(self, words: Words) -> bool:
        """Write which tokens may come next.

        Args:
            words: int32 [ceil(vocab / 32)], contiguous; every word is written. Bits beyond the vocabulary mean nothing.

        Returns:
            False if every token is allowed; then `words` may be ignored.
        """
        assert not self._terminated, "no token may follow the end of the grammar"
        assert words.shape == (self.num_words,), f"{words.shape} for {self.num_words} words"
        started = time.thread_time()
        limited = self._fill(words)
        self._seconds += time.thread_time() - started
        self.stuck = limited and not words.any()
        if self.stuck:
            for end in self._grammar.end_token_ids:
                words[end // 32] |= np.uint32(1 << end % 32).astype(np.int32)
        return limited

    def take_seconds(self) -> float:
        """Processor time that `accept`, `try_accept` and `fill` took since this was last asked.

        Where a grammar is ambiguous it grows with each token, without bound: it is for the caller to stop in time.
        """
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _is_stuck(self) -> bool:
        words = np.empty(self.num_words, dtype=np.int32)
        return self._fill(words) and not words.any()

    def _fill(self, words: Words) -> bool:
        limited = bool(self._matcher.fill_next_token_bitmask(words.reshape(1, -1)))
        if self._surrogate_open:
            words &= self._grammar.surrogates.allowed
            # The library writes every word even if it allows all.
            return True
        return limited
