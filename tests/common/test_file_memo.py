"""What is remembered of files, and every change that makes it forgotten."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.file_memo import SETTLED_SECONDS, FileMemo


class Counter:
    """Computes something else each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        return f"value {self.calls}"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text("text")
    return files


def later() -> float:
    """A clock by which every file has been as it is for long."""
    return time.time() + 1000.0


def recall(folder: Path, paths: list[Path], clock: Callable[[], float] = later, name: str = "x") -> bool:
    """Whether it is remembered; what is said is right in any case."""
    compute = Counter()
    value = FileMemo(folder, clock).recall(name, paths, compute)
    assert value == "value 1"
    return compute.calls == 0


def test_nothing_is_computed_twice(tmp_path: Path, paths: list[Path]) -> None:
    assert [recall(tmp_path / "memo", paths) for _ in range(3)] == [False, True, True]
    assert recall(tmp_path / "memo", paths[::-1])
    assert not recall(tmp_path / "memo", paths, name="y")
    assert not recall(tmp_path / "memo", paths[:1])
    assert not recall(tmp_path / "other", paths)
    assert len(list((tmp_path / "memo").iterdir())) == 3, "an unfinished file was left"


def rewrite(path: Path) -> None:
    """Other text of the same size, and the old time of modification."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock ticks slowly
        path.write_text("TEXT")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    "change",
    [rewrite, replace, lambda path: path.write_text("longer text"), lambda path: os.utime(path, (1.0, 1.0))],
    ids=["rewritten", "replaced", "longer", "touched"],
)
def test_a_change_is_seen(tmp_path: Path, paths: list[Path], change: Callable[[Path], object]) -> None:
    assert not recall(tmp_path / "memo", paths)
    change(paths[1])
    assert not recall(tmp_path / "memo", paths)
    assert recall(tmp_path / "memo", paths)


def test_of_a_file_that_changed_only_just_nothing_is_remembered(tmp_path: Path, paths: list[Path]) -> None:
    newest = max(path.stat().st_ctime for path in paths)
    for age, remembered in ((0.0, False), (SETTLED_SECONDS / 2, False), (SETTLED_SECONDS + 1, False), (0.0, True)):
        assert recall(tmp_path / "memo", paths, lambda age=age: newest + age) is remembered


def test_what_was_computed_while_a_file_changed_is_not_remembered(tmp_path: Path, paths: list[Path]) -> None:
    def compute() -> str:
        paths[0].write_text("changed meanwhile")
        return "of which of the two?"

    assert FileMemo(tmp_path / "memo", later).recall("x", paths, compute) == "of which of the two?"
    assert not (tmp_path / "memo").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, paths: list[Path]) -> None:
    assert [recall(paths[0] / "memo", paths) for _ in range(2)] == [False, False]


@pytest.mark.parametrize("content", [b"", b"val", b"\xff\n"])
def test_a_torn_line_is_computed_again(tmp_path: Path, paths: list[Path], content: bytes) -> None:
    recall(tmp_path / "memo", paths)
    [line] = (tmp_path / "memo").iterdir()
    line.write_bytes(content)
    assert not recall(tmp_path / "memo", paths)
    assert recall(tmp_path / "memo", paths)


def test_a_file_that_is_not_there(tmp_path: Path, paths: list[Path]) -> None:
    with pytest.raises(FileNotFoundError):
        recall(tmp_path / "memo", [*paths, tmp_path / "c"])
