"""From a grammar's source to a serialized grammar, with proof that it can be loaded and followed at a bearable price.

Runs in a process of its own per job (`job_process.py`), which bounds its time and memory. Knows no process.
"""

import json
import math
import re
import time

import numpy as np
import xgrammar
from numpy.typing import NDArray

from common.engine.grammar.frames import Tag
from common.engine.grammar.grammar import Grammar, Words
from common.engine.grammar.json_strings import with_escapes
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.vocabulary import Vocabulary
from common.sampling import GrammarKind

#: Tokens of a random output whose masks are timed.
_TRIED_TOKENS = 128
#: The library's messages start with a time and a line of its source, and go on with the condition that failed.
_NOISE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
_LONGEST_MESSAGE = 300
#: How a job is answered: COMPILED, REFUSED or STARVED, and what belongs to it.
Reply = tuple[Tag, bytes]


class TooComplex(Exception):
    """Over a limit; in words, which."""


class JobCompiler:
    """Compiles jobs, see `encode_job`; loads the library's compilers once."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._plain = self._marked = _compiler(vocabulary.plain)
        if vocabulary.marked is not vocabulary.plain:
            self._marked = _compiler(vocabulary.marked)

    def compile(self, job: bytes) -> Reply:
        values = json.loads(job)
        try:
            kind = GrammarKind(values["kind"])
            compiler = self._plain if self._vocabulary.table(kind) is self._vocabulary.plain else self._marked
            compiled = compile_source(compiler, kind, values["source"])
            serialized = str(compiled.serialize_json()).encode()
            if len(serialized) > self._limits.output_bytes:
                raise TooComplex(f"its compiled form exceeds {self._limits.output_bytes >> 10} KiB")
            del compiled
            self._try(self._vocabulary.load_grammar(kind, serialized))
        except TooComplex as error:
            return Tag.REFUSED, f"too complex: {error}".encode()
        except MemoryError:
            return Tag.REFUSED, self._words_for_memory()
        except RecursionError:
            return Tag.REFUSED, b"too complex: it is nested too deeply"
        except (RuntimeError, ValueError) as error:
            if "bad_alloc" in str(error):
                return Tag.REFUSED, self._words_for_memory()
            return Tag.REFUSED, _cleaned(str(error)).encode(errors="replace")
        return Tag.COMPILED, serialized

    def _words_for_memory(self) -> bytes:
        return f"too complex: it takes more than {self._limits.memory_bytes >> 20} MiB of memory to compile".encode()

    def _try(self, grammar: Grammar) -> None:
        """Draw some output with it, as long as may be: in an ambiguous grammar each token takes longer than the last.

        Raises ValueError if there can be none, TooComplex if it goes slowly.
        """
        started, allowance = time.process_time(), self._limits.mask_seconds
        state, words = grammar.start(), np.empty(grammar.num_words, dtype=np.int32)
        random = np.random.default_rng(0)
        for count in range(1, _TRIED_TOKENS + 1):
            if state.fill(words):
                if count == 1 and state.stuck:
                    raise ValueError("no output of this model can match it")
                state.accept(int(random.choice(_longer(words, grammar))))
            else:
                state.accept(int(random.integers(grammar.vocab_size)))
            if state.terminated:
                break
        if time.process_time() - started > count * allowance:
            raise TooComplex(f"following it takes more than {math.ceil(allowance * 1000)} ms a token")


def _longer(words: Words, grammar: Grammar) -> NDArray[np.int64]:
    """Ids of the tokens that are allowed and do not end the output; its ends if there is nothing else."""
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: grammar.vocab_size]
    ends = list(grammar.end_token_ids)
    kept, allowed[ends] = allowed[ends], 0
    if not allowed.any():
        allowed[ends] = kept
    return np.flatnonzero(allowed)


def _compiler(table: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(table, max_threads=1, cache_enabled=False)


def encode_job(kind: GrammarKind, source: str) -> bytes:
    return json.dumps({"kind": kind.value, "source": source}).encode()


def compile_source(compiler: xgrammar.GrammarCompiler, kind: GrammarKind, source: str) -> xgrammar.CompiledGrammar:
    """Raises RuntimeError or ValueError, in the library's words, for what it cannot read.

    JSON comes out on one line, with ", " and ": " between its parts, as `json.dumps` writes it and models know it best:
    free white space lets small models run on with line breaks until `max_tokens`. In structural tags, where the library
    offers no such thing, at most one space or line break stands between parts, unless the tag sets its own bound.
    An object whose properties are named has no others, unless `additionalProperties` says so.
    """
    match kind:
        case GrammarKind.JSON_SCHEMA:
            grammar = xgrammar.Grammar.from_json_schema(source, any_whitespace=False, strict_mode=True)
            return compiler.compile_grammar(with_escapes(grammar))
        case GrammarKind.EBNF:
            return compiler.compile_grammar(source)
        case GrammarKind.STRUCTURAL_TAG:
            grammar = xgrammar.Grammar.from_structural_tag(_with_bounded_whitespace(source))
            return compiler.compile_grammar(with_escapes(grammar))


def _with_bounded_whitespace(structural_tag: str) -> str:
    """Raises ValueError for what is no JSON."""
    try:
        value = json.loads(structural_tag)
    except ValueError as error:
        raise ValueError(f"the structural tag is not JSON: {error}") from error
    _bound_whitespace(value)
    return json.dumps(value)


def _bound_whitespace(value: object) -> None:
    """Changes the formats that hold a JSON schema, wherever they stand; what a schema holds is its own."""
    if isinstance(value, list):
        for item in value:
            _bound_whitespace(item)
    elif isinstance(value, dict):
        if value.get("type") == "json_schema":
            value.setdefault("max_whitespace_cnt", 1)
            return
        for item in value.values():
            _bound_whitespace(item)


def _cleaned(message: str) -> str:
    words = _NOISE.sub("", message).strip()
    return words if len(words) <= _LONGEST_MESSAGE else words[:_LONGEST_MESSAGE] + "..."
