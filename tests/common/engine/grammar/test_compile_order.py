"""With real processes: heavy sources delay no light one, wait stopped meanwhile, and leave nothing behind."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine.grammar.compiler import GrammarCompiler
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import Overloaded
from tests.common.engine.grammar.compilers import NEVER_STOPPED, PATIENCE, begun, compiling, endless, until, works
from tests.common.engine.grammar.processes import descriptors_of, is_alive

pytestmark = pytest.mark.slow

LIMITS = replace(NEVER_STOPPED, slice_seconds=0.1, max_kept=2, max_heavy=3)


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    with compiling(vocabulary, LIMITS) as made:
        yield made


def state_of(pid: int) -> str:
    """As the kernel has it: T for stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_light_ones_are_answered_while_heavy_ones_that_came_before_are_not(compiler: GrammarCompiler) -> None:
    heavy = [compiler.compile(endless()) for _ in range(LIMITS.max_heavy)]
    await begun(compiler, LIMITS.max_kept)
    for number in range(3):
        assert await asyncio.to_thread(works, compiler, f"light {number}")
    assert not any(future.done() for future in heavy)
    # Those that keep what they have done take turns.
    for job in await begun(compiler, LIMITS.max_kept):
        await until(lambda pid=job: state_of(pid) == "T")
        await until(lambda pid=job: state_of(pid) == "R")
    for future in heavy:
        assert future.cancel()
    await begun(compiler, 0)


async def test_one_that_nobody_wants_any_more_is_ended_running_or_not(compiler: GrammarCompiler) -> None:
    one, other = endless(), endless()
    futures = [compiler.compile(one), compiler.compile(other), compiler.compile(other)]
    jobs = await begun(compiler, 2)
    assert futures[0].cancel() and futures[1].cancel()
    await until(lambda: not is_alive(jobs[0]))
    assert is_alive(jobs[1]) and not futures[2].done()
    assert futures[2].cancel()
    await begun(compiler, 0)
    # It is begun anew for whoever comes then.
    again = compiler.compile(other)
    await begun(compiler, 1)
    assert again.cancel()
    await begun(compiler, 0)


async def test_of_too_many_heavy_ones_the_newest_is_a_shortage_and_not_kept(compiler: GrammarCompiler) -> None:
    heavy = [compiler.compile(endless()) for _ in range(LIMITS.max_heavy)]
    await begun(compiler, LIMITS.max_kept)
    late = endless()
    for _ in range(2):
        error = await asyncio.to_thread(compiler.compile(late).exception, PATIENCE)
        assert isinstance(error, Overloaded) and error.retry_after and "take long" in error.message
    assert not any(future.done() for future in heavy)
    for future in heavy:
        assert future.cancel()
    await begun(compiler, 0)


async def test_jobs_leave_nothing_open_in_the_process(compiler: GrammarCompiler) -> None:
    """Answered, begun anew, ended for want of a place, and cancelled while stopped."""
    assert compiler.pid is not None
    assert await asyncio.to_thread(works, compiler, "first")
    before = descriptors_of(compiler.pid)
    heavy = [compiler.compile(endless()) for _ in range(LIMITS.max_heavy + 1)]
    assert await asyncio.to_thread(works, compiler, "second")
    assert isinstance(await asyncio.to_thread(heavy[-1].exception, PATIENCE), Overloaded)
    for future in heavy[:-1]:
        assert future.cancel()
    await begun(compiler, 0)
    assert descriptors_of(compiler.pid) == before
