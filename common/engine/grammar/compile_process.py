"""Compiles grammars in a process that can be killed: `python -m common.engine.grammar.compile_process PARENT`.

This process loads library and vocabulary once and then only forks: each job runs in a child of its own, under limits of
its own, starts within milliseconds, and takes nothing with it when it is killed, runs out of memory or crashes. A child
also proves that what it compiled can be loaded, and followed token by token at a bearable price, before the worker's
own process does so. Ends when its input does, and dies with its parent.
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import re
import resource
import select
import signal
import sys
import time
from typing import BinaryIO

import numpy as np
import xgrammar
from numpy.typing import NDArray

from common.engine.grammar.frames import Tag, read_frame, write_frame
from common.engine.grammar.grammar import Grammar, Words
from common.engine.grammar.json_strings import with_escapes
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.vocabulary import Vocabulary
from common.sampling import GrammarKind

_PR_SET_PDEATHSIG = 1
#: Half of what a thread of the worker has: what fits here fits there.
_STACK_BYTES = 4 << 20
#: Tokens of a random output whose masks are timed.
_TRIED_TOKENS = 128
#: No job ends with these by itself; the kernel sends SIGKILL when the machine has no memory left.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
#: The library's messages start with a time and a line of its source, and go on with the condition that failed.
_NOISE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
_LONGEST_MESSAGE = 300

Reply = tuple[Tag, bytes]


class TooComplex(Exception):
    """Over a limit; in words, which."""


def main() -> None:
    die_with(int(sys.argv[1]))
    # Ctrl-C goes to the whole process group; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = _take_pipes()
    limits, vocabulary = read_frame(source), read_frame(source)
    if limits is None or vocabulary is None:
        return
    compiler = JobCompiler(Vocabulary.deserialize(vocabulary[1]), CompileLimits.from_json(limits[1]))
    # What is there now is never freed: collecting it in a child would only copy its pages.
    gc.collect()
    gc.freeze()
    # A parent that is gone is noticed by reading.
    with contextlib.suppress(BrokenPipeError):
        write_frame(sink, Tag.READY, b"")
        while (frame := read_frame(source)) is not None:
            write_frame(sink, *compiler.run(frame[1]))


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies. Elsewhere than on Linux the end of the input has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It died before we asked: nobody would ever tell us.
        if os.getppid() != parent:
            sys.exit(1)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout as frames' streams; what the library prints goes to stderr."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return source, sink


class JobCompiler:
    """Runs one job at a time, each in a fork of this process, which must have no other threads."""

    def __init__(self, vocabulary: Vocabulary, limits: CompileLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._plain = self._marked = _compiler(vocabulary.plain)
        if vocabulary.marked is not vocabulary.plain:
            self._marked = _compiler(vocabulary.marked)

    def run(self, job: bytes) -> Reply:
        """Compile a job (see `encode_job`), within the limits whatever it is."""
        output, child_output = os.pipe()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            self._run_child(parent, child_output, job)
        os.close(child_output)
        reply = _read_until(output, time.monotonic() + self._limits.wall_seconds)
        os.close(output)
        if reply is None:
            # Nobody has waited for it yet, so the number is still its own.
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if reply is None:
            return Tag.STARVED, f"not compiled within {self._limits.wall_seconds:g} s: the machine is busy".encode()
        if status == 0 and reply:
            return Tag(reply[0]), reply[1:]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _FROM_OUTSIDE:
            return Tag.STARVED, b"not compiled: something else ended the compiler, the machine may be out of memory"
        return Tag.REFUSED, self._words_for(status).encode()

    def _words_for(self, status: int) -> str:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGPROF:
                return f"too complex: it takes more than {self._limits.cpu_seconds:g} s to compile"
            return f"too complex: the compiler ended with {signal.Signals(number).name}"
        return "too complex: the compiler failed"

    # --- in the child -------------------------------------------------------------------------------

    def _run_child(self, parent: int, output: int, job: bytes) -> None:
        """Ends the process, whatever happens: nothing of the parent's may run twice."""
        status = 1
        try:
            die_with(parent)
            self._limit_this_process()
            tag, payload = self._compile(job)
            with os.fdopen(output, "wb") as stream:
                stream.write(bytes([tag]) + payload)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _limit_this_process(self) -> None:
        if sys.platform == "linux":
            most = _address_space() + self._limits.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Kills by SIGPROF, in the library's code too.
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_seconds)

    def _compile(self, job: bytes) -> Reply:
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
        case GrammarKind.REGEX:
            return compiler.compile_regex(source)
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


def _read_until(output: int, deadline: float) -> bytes | None:
    """All that is written until the pipe's other end is closed; None if that takes too long."""
    parts: list[bytes] = []
    while select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(output, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _address_space() -> int:
    """Bytes of this process, mapped or not."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _cleaned(message: str) -> str:
    words = _NOISE.sub("", message).strip()
    return words if len(words) <= _LONGEST_MESSAGE else words[:_LONGEST_MESSAGE] + "..."


if __name__ == "__main__":
    main()
