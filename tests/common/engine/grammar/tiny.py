"""Grammars over a tiny byte-level vocabulary, compiled in this process and followed by hand."""

from collections.abc import Iterable, Sequence

import numpy as np
import xgrammar
from numpy.typing import NDArray

from common.engine.grammar import Grammar, GrammarState
from common.engine.grammar.job_compiler import compile_source
from common.engine.grammar.vocabulary import Vocabulary
from common.sampling import GrammarKind, GrammarSpec
from common.text.tokenizer import Tokenizer

#: `<|im_end|>`.
END_IDS = (2,)
#: The model's embedding is padded beyond the tokenizer, to a width that no mask word divides.
PADDING = 6

PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", '
    '"minimum": 0, "maximum": 150}, "tags": {"type": "array", "items": {"enum": ["a", "b", null]}, "maxItems": 3}}, '
    '"required": ["name", "age"], "additionalProperties": false}'
)
TOOL_CALL = (
    '{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [{"begin": "<f>", '
    '"content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {"type": "integer"}}, '
    '"required": ["x"]}}, "end": "</f>"}]}}'
)
EXPRESSION = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'
SPECS = {
    "schema": GrammarSpec(GrammarKind.JSON_SCHEMA, PERSON),
    "counted": GrammarSpec(GrammarKind.EBNF, r'root ::= ("one" | "two" | "caf\u00e9") (" " [0-9]{1,3}){0,2}'),
    "ebnf": GrammarSpec(GrammarKind.EBNF, EXPRESSION),
    "tag": GrammarSpec(GrammarKind.STRUCTURAL_TAG, TOOL_CALL),
}


def no_bugs(error: BaseException) -> None:
    raise AssertionError("the compiler's thread has died") from error


def make_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size + PADDING, END_IDS)
    assert vocabulary.plain.vocab_size % 32, "a width that hides what happens in the last word"
    return vocabulary


class Bench:
    """Compiles without a process, and turns texts into tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.vocab_size: int = vocabulary.plain.vocab_size

    def compile(self, spec: GrammarSpec) -> Grammar:
        compiler = xgrammar.GrammarCompiler(self.vocabulary.table(spec.kind), max_threads=1, cache_enabled=False)
        return self._grammar(compile_source(compiler, spec.kind, spec.source))

    def regex(self, pattern: str) -> Grammar:
        """The shortest way to write a grammar down; workers are sent none of these."""
        compiler = xgrammar.GrammarCompiler(self.vocabulary.plain, max_threads=1, cache_enabled=False)
        return self._grammar(compiler.compile_regex(pattern))

    def _grammar(self, compiled: xgrammar.CompiledGrammar) -> Grammar:
        return Grammar(compiled, str(compiled.serialize_json()).encode(), self.vocabulary.surrogates)

    def schema(self, source: str) -> Grammar:
        return self.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, source))

    def ebnf(self, source: str) -> Grammar:
        return self.compile(GrammarSpec(GrammarKind.EBNF, source))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, token_ids: Iterable[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, token_ids)).decode()

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether it is a whole output of the grammar."""
        state = grammar.start()
        return all(state.try_accept(token) for token in (*self.encode(text), END_IDS[0]))


def mask_of(state: GrammarState) -> NDArray[np.int32]:
    """The bits of `fill`; all of them where it says that it does not matter."""
    words = np.empty(state.num_words, dtype=np.int32)
    return words if state.fill(words) else np.full_like(words, -1)


def allowed_ids(words: NDArray[np.int32], vocab_size: int) -> list[int]:
    """Slowly, a bit at a time."""
    return [i for i in range(vocab_size) if int(words[i // 32]) >> (i % 32) & 1]


def masks_along(grammar: Grammar, token_ids: Sequence[int]) -> list[NDArray[np.int32]]:
    """The mask before each token."""
    state, masks = grammar.start(), []
    for token_id in token_ids:
        masks.append(mask_of(state))
        state.accept(token_id)
    return masks


def random_output(grammar: Grammar, seed: int, longest: int = 200) -> list[int]:
    """Tokens drawn from the masks, ends liked best so that it does end; it ends with an end token or is cut."""
    state, random, output = grammar.start(), np.random.default_rng(seed), list[int]()
    while len(output) < longest and not state.terminated:
        ids = allowed_ids(mask_of(state), grammar.vocab_size)
        ends = [i for i in ids if i in grammar.end_token_ids]
        output.append(int(random.choice(ends if ends and random.random() < 0.3 else ids)))
        state.accept(output[-1])
    return output
