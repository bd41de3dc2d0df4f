"""Compilers with their real processes, and sources for them."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from common.engine.grammar import Grammar
from common.engine.grammar.compiler import GrammarCompiler
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest
from common.sampling import GrammarKind, GrammarSpec
from tests.common.engine.grammar.hostile import many_rules
from tests.common.engine.grammar.processes import children_of
from tests.common.engine.grammar.tiny import no_bugs

#: Seconds for what takes a few on a quiet machine: a process loads its libraries.
PATIENCE = 90.0
#: Under these an endless job goes on; it would meet the usual bound of memory within seconds.
NEVER_STOPPED = CompileLimits(cpu_seconds=600, wall_seconds=600, memory_bytes=8 << 30)
_SIZES = itertools.count(20_000)


def endless() -> GrammarSpec:
    """Goes on for minutes; another one each time."""
    return GrammarSpec(GrammarKind.EBNF, many_rules(next(_SIZES)))


def literal(text: str) -> GrammarSpec:
    """Takes milliseconds."""
    return GrammarSpec(GrammarKind.EBNF, f'root ::= "{text}"')


def refusal(future: "Future[Grammar]") -> str:
    error = future.exception(PATIENCE)
    assert isinstance(error, InvalidRequest) and error.field == "grammar", error
    return error.message


def works(compiler: GrammarCompiler, text: str) -> bool:
    return compiler.compile(literal(text)).result(PATIENCE).num_words > 0


@contextlib.contextmanager
def compiling(vocabulary: Vocabulary, limits: CompileLimits, max_waiting: int = 64) -> Iterator[GrammarCompiler]:
    """A compiler that is ready."""
    made = GrammarCompiler(vocabulary, on_fatal=no_bugs, limits=limits, max_waiting=max_waiting)
    made.start()
    try:
        assert works(made, "ready")
        yield made
    finally:
        made.close()


async def until(condition: Callable[[], object]) -> None:
    """`eventually`, for what takes a process' start."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # the kernel's state; nobody sets an event for it
            await asyncio.sleep(0.01)


async def begun(compiler: GrammarCompiler, count: int) -> list[int]:
    """Pids of the jobs that have begun, once they are so many."""
    found: list[int] = []

    def are_there() -> bool:
        found[:] = [] if compiler.pid is None else children_of(compiler.pid)
        return len(found) == count

    await until(are_there)
    return found
