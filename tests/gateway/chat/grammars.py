"""Walks through grammars as workers compile them, over a vocabulary of single bytes."""

import random

import xgrammar

from common.engine.grammar.job_compiler import compile_source
from common.sampling import GrammarKind, GrammarSpec

_END = 256
_VOCABULARY = [bytes([byte]) for byte in range(256)] + [b"<end>"]
_INFO = xgrammar.TokenizerInfo(_VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_END])
_COMPILER = xgrammar.GrammarCompiler(_INFO)


def matcher_of(grammar: GrammarSpec | None) -> xgrammar.GrammarMatcher:
    assert grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG
    return xgrammar.GrammarMatcher(compile_source(_COMPILER, grammar.kind, grammar.source))


def accepts(grammar: GrammarSpec | None, text: str) -> bool:
    """Whether an answer may be this text and end there."""
    matcher = matcher_of(grammar)
    return matcher.accept_string(text) and matcher.accept_token(_END)


def random_text(grammar: GrammarSpec | None, seed: int, *, start: str = "", longest: int = 4000) -> str:
    """What a model without any sense might write behind `start`, up to where it may end; dull ASCII, for brevity."""
    matcher, draw = matcher_of(grammar), random.Random(seed)
    bitmask = xgrammar.allocate_token_bitmask(1, len(_VOCABULARY))
    assert matcher.accept_string(start)
    text = bytearray(start.encode())
    for _ in range(longest):
        matcher.fill_next_token_bitmask(bitmask)
        words = [int(word) & 0xFFFFFFFF for word in bitmask[0]]
        allowed = [token for token in range(257) if words[token // 32] >> (token % 32) & 1]
        assert allowed, bytes(text)
        if allowed == [_END] or (_END in allowed and draw.random() < 0.5):
            return text.decode()
        # Ends of strings and numbers, and no blanks, or texts would hardly end.
        telling = [token for token in allowed if chr(token) in '",}]01234abc']
        plain = [token for token in allowed if 33 <= token < 127]
        token = draw.choice(telling if telling and draw.random() < 0.9 else plain or [t for t in allowed if t != _END])
        assert matcher.accept_token(token)
        text.append(token)
    raise AssertionError(f"no end after {longest} characters: {text[-200:]!r}")
