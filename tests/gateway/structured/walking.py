"""Grammars over a small vocabulary, compiled as decode workers do: what they accept, and texts drawn at random."""

import random

import numpy as np
import xgrammar

from common.engine.grammar.job_compiler import compile_source
from common.sampling import GrammarSpec

#: Every byte, and some longer tokens that end in the midst of things.
_LONGER = (
    '{"',
    '": ',
    '", "',
    "}, ",
    '"}',
    "]}",
    "[[",
    "true",
    "null",
    ", ",
    "00",
    '\\"',
    "ab",
    "-1.5e",
    "\\u00",
    "é",
    "20",
)
_TOKENS = [bytes([byte]) for byte in range(256)] + [text.encode() for text in _LONGER]
_END = len(_TOKENS)
#: What a walk that should come to its end takes first, if it may.
_CLOSING = (b'"', b"}", b"]", b"}, ", b'"}', b"]}")


class Bench:
    """Compiles and walks."""

    def __init__(self) -> None:
        vocabulary = xgrammar.TokenizerInfo([*_TOKENS, b""], stop_token_ids=[_END])
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        """Raises RuntimeError for what the compiler does not take."""
        return compile_source(self._compiler, spec.kind, spec.source)

    def accepts(self, grammar: xgrammar.CompiledGrammar, text: str) -> bool:
        """Whether the whole text is an answer."""
        matcher = xgrammar.GrammarMatcher(grammar)
        data = text.encode("utf-8", "surrogatepass")
        return all(matcher.accept_token(byte) for byte in data) and bool(matcher.accept_token(_END))

    def walk(self, grammar: xgrammar.CompiledGrammar, chance: random.Random, patience: int) -> str | None:
        """A text drawn at random; None if it has not ended long after `patience` tokens."""
        matcher = xgrammar.GrammarMatcher(grammar)
        words = xgrammar.allocate_token_bitmask(1, _END + 1)
        out = bytearray()
        for count in range(patience * 20):
            matcher.fill_next_token_bitmask(words)
            bits = np.unpackbits(words.numpy().view(np.uint8)[0], bitorder="little")[: _END + 1]
            allowed = [int(token) for token in np.flatnonzero(bits)]
            if not allowed:
                raise AssertionError(f"stuck behind {bytes(out)!r}")
            token = self._pick(_without_surrogates(out, allowed), chance, hurried=count > patience)
            assert matcher.accept_token(token)
            if token == _END:
                return out.decode()
            out += _TOKENS[token]
        return None

    def _pick(self, allowed: list[int], chance: random.Random, *, hurried: bool) -> int:
        if hurried and _END in allowed:
            return _END
        if hurried and chance.random() < 0.8:
            closing = [token for token in allowed if token != _END and _TOKENS[token] in _CLOSING]
            if closing:
                return chance.choice(closing)
        printable = [token for token in allowed if token == _END or _TOKENS[token].isascii()]
        return chance.choice(printable if printable and chance.random() < 0.9 else allowed)


def _without_surrogates(out: bytearray, allowed: list[int]) -> list[int]:
    """Grammars let halves of surrogate pairs pass as three bytes; that is no UTF-8, and no text has taught it."""
    return [token for token in allowed if not 0xA0 <= token <= 0xBF] if out[-1:] == b"\xed" else allowed
