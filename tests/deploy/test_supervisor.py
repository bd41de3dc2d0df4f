"""The supervisor with dummy children: restarts, backoff, order of ending, nothing left behind."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.supervisor import Backoff, ChildRefused, Keeper, ProcessSpec

READY_THEN_SLEEP = "print('up', flush=True)\nimport signal\nsignal.pause()"
IGNORES_SIGTERM = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY_THEN_SLEEP}"
WITH_GRANDCHILD = f"""import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
print(child.pid, flush=True)
{READY_THEN_SLEEP}"""


def spec(code: str, grace: float = 20.0) -> ProcessSpec:
    return ProcessSpec("child", (sys.executable, "-c", code), dict(os.environ), grace)


class Lines:
    """What children said, to be awaited line by line."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, name: str, line: str) -> None:
        assert name == "child"
        self._queue.put_nowait(line)

    async def next(self) -> str:
        return await asyncio.wait_for(self._queue.get(), 20)


class Time:
    """A clock that moves only when the supervisor sleeps or the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def keepers() -> AsyncIterator[list[Keeper]]:
    """Keepers put here are ended after the test, however it went."""
    started: list[Keeper] = []
    yield started
    for keeper in started:
        keeper.kill()
        await asyncio.wait([keeper.done])


def alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie (nobody reaps orphans in some containers) does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def until_gone(pid: int) -> None:
    """Nobody tells of the end of a process that is not our child: look until it comes."""
    async with asyncio.timeout(20):
        while alive(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_backoff_doubles_to_its_limit_and_starts_afresh_after_a_stable_life() -> None:
    backoff = Backoff(first=1, limit=6, stable=60)
    assert [backoff.after(uptime) for uptime in (0, 0, 59, 0, 0, 60, 0)] == [1, 2, 4, 6, 6, 1, 2]


async def test_a_child_that_died_is_started_again_with_backoff(lines: Lines, keepers: list[Keeper]) -> None:
    time = Time()
    keeper = Keeper(spec(READY_THEN_SLEEP), lines, backoff=Backoff(first=1), clock=time.clock, sleep=time.sleep)
    keepers.append(keeper)
    keeper.start()
    pids = set()
    for delay in (1, 2, 4):
        assert await lines.next() == "up"
        assert keeper.pid is not None
        pids.add(keeper.pid)
        os.kill(keeper.pid, signal.SIGKILL)
        assert await lines.next() == f"died (killed by SIGKILL); starting again in {delay}.0 s"
    assert await lines.next() == "up"
    assert (len(pids), keeper.starts, time.slept) == (3, 4, [1, 2, 4])


async def test_a_long_life_makes_the_next_restart_quick(lines: Lines, keepers: list[Keeper]) -> None:
    time = Time()
    backoff = Backoff(first=1, stable=60)
    backoff.after(0)
    keeper = Keeper(spec(READY_THEN_SLEEP), lines, backoff=backoff, clock=time.clock, sleep=time.sleep)
    keepers.append(keeper)
    keeper.start()
    assert await lines.next() == "up"
    time.now += 61
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    assert "starting again in 1.0 s" in await lines.next()


async def test_exit_code_2_at_the_first_start_is_final_and_keeps_the_reason(lines: Lines) -> None:
    refuse = "import sys\nprint('tandem: error: --block-size: must be positive', file=sys.stderr)\nsys.exit(2)"
    keeper = Keeper(spec(refuse), lines)
    keeper.start()
    with pytest.raises(ChildRefused, match=r"child does not start: --block-size: must be positive"):
        await keeper.done
    assert keeper.starts == 1


async def test_stop_ends_a_child_with_sigterm(lines: Lines, keepers: list[Keeper]) -> None:
    keeper = Keeper(spec(READY_THEN_SLEEP, grace=1000), lines)
    keepers.append(keeper)
    keeper.start()
    assert await lines.next() == "up"
    pid = keeper.pid
    assert pid is not None
    await keeper.stop()
    assert not alive(pid)
    assert keeper.starts == 1
    await keeper.stop()


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(lines: Lines, keepers: list[Keeper]) -> None:
    keeper = Keeper(spec(IGNORES_SIGTERM, grace=0.05), lines)
    keepers.append(keeper)
    keeper.start()
    assert await lines.next() == "up"
    pid = keeper.pid
    assert pid is not None
    await keeper.stop()
    assert not alive(pid)


async def test_stop_while_waiting_to_start_again(lines: Lines, keepers: list[Keeper]) -> None:
    keeper = Keeper(spec("raise SystemExit(7)"), lines, backoff=Backoff(first=1000))
    keepers.append(keeper)
    keeper.start()
    assert await lines.next() == "died (exit code 7); starting again in 1000.0 s"
    await keeper.stop()
    assert keeper.starts == 1


async def test_what_a_child_started_dies_with_it(lines: Lines, keepers: list[Keeper]) -> None:
    keeper = Keeper(spec(WITH_GRANDCHILD), lines, backoff=Backoff(first=1000))
    keepers.append(keeper)
    keeper.start()
    grandchild = int(await lines.next())
    assert alive(grandchild)
    assert await lines.next() == "up"
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    assert "died" in await lines.next()
    await until_gone(grandchild)


async def test_output_of_any_length_and_encoding_passes(lines: Lines, keepers: list[Keeper]) -> None:
    noisy = "import sys, signal\nsys.stdout.buffer.write(b'x' * 300_000 + b'\\n\\xff\\r\\nlast')\nsys.stdout.flush()"
    keeper = Keeper(spec(noisy), lines, backoff=Backoff(first=1000))
    keepers.append(keeper)
    keeper.start()
    assert await lines.next() == "x" * 300_000
    assert await lines.next() == "\N{REPLACEMENT CHARACTER}"
    assert await lines.next() == "last"


SUPERVISOR_OF_ONE = f"""
import asyncio, os, sys
from deploy.supervisor import Keeper, ProcessSpec
async def main():
    spec = ProcessSpec("child", (sys.executable, "-c", {IGNORES_SIGTERM!r}), dict(os.environ), 5.0)
    keeper = Keeper(spec, lambda name, line: print(keeper.pid, flush=True))
    keeper.start()
    await keeper.done
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
async def test_no_orphan_when_the_supervisor_itself_is_killed() -> None:
    command = (sys.executable, "-c", SUPERVISOR_OF_ONE)
    supervisor = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert supervisor.stdout is not None
    child = int(await supervisor.stdout.readline())
    assert alive(child)
    supervisor.kill()
    await supervisor.wait()
    await until_gone(child)
