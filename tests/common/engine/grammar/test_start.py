"""Compile processes that are forked from a worker: used first, replaced when lost, and gone with it in any case."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from common.engine.grammar.start import ForkedProcess, fork_process
from tests.common.engine.grammar.compilers import PATIENCE
from tests.common.engine.grammar.processes import is_alive
from tests.common.text.model_folders import byte_level_folder
from tests.factories.rpc import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="elsewhere none are forked")]


def command(tmp_path: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tests.common.engine.grammar.forking_parent",
        str(byte_level_folder(tmp_path)),
        *options,
    ]


def test_first_one_is_forked_and_a_lost_one_replaced(tmp_path: Path) -> None:
    ended = subprocess.run(command(tmp_path), stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    said = dict(line.split(": ") for line in ended.stdout.splitlines())
    forked = int(said.pop("forked"))
    assert said == {
        "compiled by the forked one": "True",
        "the other one is gone": "True",
        "compiled by another one": "True",
        "none is left": "True",
    }
    assert not is_alive(forked)


def test_none_is_forked_where_other_threads_run() -> None:
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        assert fork_process() is None
    finally:
        end.set()
        other.join()


def test_nobody_kills_between_the_end_and_the_note_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel has forgotten a process its number may be another's at once."""
    process, wait_for = ended_process(), os.waitpid

    def forgotten(pid: int, options: int) -> tuple[int, int]:
        answer = wait_for(pid, options)
        assert process._lock.locked()
        return answer

    monkeypatch.setattr(os, "waitpid", forgotten)
    process.kill()
    process.wait()
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail(f"killed {pid}"))
    process.kill()
    process.wait()
    process.discard()


def ended_process() -> ForkedProcess:
    """A child that nobody has waited for."""
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.returncode = 0  # So that it is not waited for there.
    assert child.stdin is not None and child.stdout is not None
    return ForkedProcess(child.pid, cast(BinaryIO, child.stdin), cast(BinaryIO, child.stdout))


async def test_it_dies_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    worker = subprocess.Popen(command(tmp_path, "stay"), stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert worker.stdout is not None
    try:
        forked = next(int(line.split(": ")[1]) for line in worker.stdout if line.startswith("forked"))
        assert is_alive(forked)
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    await eventually(lambda: not is_alive(forked))
