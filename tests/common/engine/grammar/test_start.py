"""Compile processes that are forked from a worker: used first, replaced when lost, and gone with it in any case."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.engine.grammar.compilers import PATIENCE
from tests.common.engine.grammar.processes import is_alive
from tests.common.text.model_folders import byte_level_folder
from tests.factories.rpc import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere none are forked")


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
