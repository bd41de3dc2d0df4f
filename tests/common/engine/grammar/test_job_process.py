"""One job in its own process: what is counted while it waits for its turn, and what is left of it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from common.engine.grammar.frames import Tag
from common.engine.grammar.job_compiler import Reply
from common.engine.grammar.job_process import JobProcess
from common.engine.grammar.limits import CompileLimits
from tests.common.engine.grammar.processes import children_of, descriptors

LIMITS = CompileLimits(cpu_seconds=600)


class Endless:
    """Says that it has begun, and goes on."""

    def __init__(self) -> None:
        self.told, self._tell = os.pipe()

    def compile(self, job: bytes) -> Reply:
        os.write(self._tell, job)
        while True:
            pass

    def close(self) -> None:
        os.close(self.told)
        os.close(self._tell)


class Quick:
    def compile(self, job: bytes) -> Reply:
        return Tag.REFUSED, job * 100_000


def start(compiler: object, job: bytes = b"job") -> JobProcess:
    return JobProcess(cast(Any, compiler), LIMITS, job)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = descriptors(), children_of(os.getpid())
    yield
    assert (descriptors(), children_of(os.getpid())) == before


def test_what_it_waits_counts_for_nothing() -> None:
    # The session may have processes that serve other tests.
    others = set(children_of(os.getpid()))
    with contextlib.closing(Endless()) as endless:
        process = start(endless)
        assert os.read(endless.told, 10) == b"job"
        first = process.cpu_seconds
        while process.cpu_seconds == first:
            pass
        process.pause()
        wall = process.wall_seconds
        [pid] = set(children_of(os.getpid())) - others
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass
        cpu = process.cpu_seconds
        assert wall > 0 and cpu > first
        assert all(process.wall_seconds == wall and process.cpu_seconds == cpu for _ in range(100))
        process.resume()
        while process.cpu_seconds == cpu or process.wall_seconds == wall:
            pass
        process.pause()
        process.kill()


def test_an_answer_of_one_that_was_stopped_is_whole() -> None:
    """However far it had come; the pipe is smaller than what it has to say."""
    process = start(Quick())
    process.pause()
    process.resume()
    process.pause()
    process.resume()
    while process.read():
        process.pause()
        process.resume()
    # It may not have come to its end yet.
    process.pause()
    assert process.reply() == (Tag.REFUSED, b"job" * 100_000)
