"""Answers as tokens: walks through grammars over a model's own vocabulary, and what a client hears of them."""

import random
from collections.abc import Sequence, Set
from itertools import pairwise

import xgrammar

from common.engine.grammar.job_compiler import compile_source
from common.engine.grammar.vocabulary import Vocabulary
from common.sampling import FinishReason, GrammarSpec
from common.text.tokenizer import Tokenizer
from gateway.chat.prepare import PreparedChat
from gateway.completion import ChoiceText
from gateway.generation import TokenDelta
from gateway.serving import ServingModel
from tests.gateway.chat.reading import Heard, hear
from tests.gateway.chat.templates import VOCAB_SIZE


class Worker:
    """Stands in for a worker with the same model folder: compiles and draws, but has no weights."""

    def __init__(self, model: ServingModel) -> None:
        self.tokenizer: Tokenizer = model.tokenizer
        assert self.tokenizer.eos_id is not None
        self.end: int = self.tokenizer.eos_id
        self._vocabulary = Vocabulary.of(self.tokenizer, VOCAB_SIZE, [self.end])
        texts = {i: self.tokenizer.token_bytes(i) for i in range(self.tokenizer.vocab_size)}
        #: Ends of strings and numbers, and no blanks, or texts would hardly end.
        self._telling = {i for i, text in texts.items() if len(text) == 1 and text in b'",}]01234abc'}
        self._dull = {i for i, text in texts.items() if text and all(33 <= byte < 127 for byte in text)}

    def special(self, text: str) -> int:
        """The id of a special token."""
        token_id = self.tokenizer.token_id(text)
        assert token_id in self.tokenizer.special_ids and token_id is not None, text
        return token_id

    def ids(self, text: str, *, special: bool) -> list[int]:
        """Tokens of a text, marks in it as special tokens or in letters."""
        return self.tokenizer.encode(text, add_special_tokens=False, parse_special=special)

    def takes(self, grammar: GrammarSpec | None, ids: Sequence[int]) -> bool:
        """Whether an answer may begin with these tokens."""
        matcher = self._matcher(grammar)
        return all(matcher.accept_token(token_id) for token_id in ids)

    def answer(
        self, grammar: GrammarSpec | None, seed: int, *, liked: Set[int], start: Sequence[int] = (), longest: int = 3000
    ) -> list[int]:
        """Tokens of a model without any sense that writes `liked` ones half of the time that it may, others never."""
        matcher, draw, output = self._matcher(grammar), random.Random(seed), list(start)
        assert all(matcher.accept_token(token_id) for token_id in start)
        while len(output) < longest:
            allowed = self._allowed(matcher)
            assert allowed, output
            if allowed == {self.end} or (self.end in allowed and draw.random() < 0.5):
                return [*output, self.end]
            output.append(self._draw(draw, allowed - {self.end}, liked))
            assert matcher.accept_token(output[-1])
        raise AssertionError(f"no end: {output[-100:]}")

    def _draw(self, draw: random.Random, allowed: set[int], liked: Set[int]) -> int:
        for wanted, chance in ((liked, 0.5), (self._telling, 0.9), (self._dull - self.tokenizer.special_ids, 1.0)):
            if (found := sorted(allowed & wanted)) and draw.random() < chance:
                return draw.choice(found)
        return draw.choice(sorted(allowed - self.tokenizer.special_ids))

    def _allowed(self, matcher: xgrammar.GrammarMatcher) -> set[int]:
        bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
        if not matcher.fill_next_token_bitmask(bitmask):
            return set(range(self.tokenizer.vocab_size))
        words = [int(word) & 0xFFFFFFFF for word in bitmask[0]]
        return {i for i in range(VOCAB_SIZE) if words[i // 32] >> (i % 32) & 1}

    def _matcher(self, grammar: GrammarSpec | None) -> xgrammar.GrammarMatcher:
        assert grammar is not None
        compiler = xgrammar.GrammarCompiler(self._vocabulary.table(grammar.kind), max_threads=1)
        return xgrammar.GrammarMatcher(compile_source(compiler, grammar.kind, grammar.source))


def heard(chat: PreparedChat, tokenizer: Tokenizer, ids: Sequence[int], *cuts: int) -> Heard:
    """What a client hears of an answer of these tokens, behind which an end token comes if it is not there yet."""
    assert tokenizer.eos_id is not None
    ids = ids if ids[-1] == tokenizer.eos_id else [*ids, tokenizer.eos_id]
    choice = ChoiceText(0, tokenizer, chat.prepared.text)
    pieces = []
    for start, end in pairwise([0, *cuts, len(ids)]):
        finish = FinishReason.STOP if end == len(ids) else None
        delta = choice.push(TokenDelta(0, start, tuple(ids[start:end]), finish_reason=finish))
        pieces += [delta.text] if delta is not None and delta.text else []
    return hear(chat.new_parser(), pieces)
