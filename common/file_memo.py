"""What was computed of files, remembered on disk until one of them changes. Does not know what it is.

A file counts as unchanged while its path, device, inode, size and times of change are. A copy put in its place, an edit
that keeps the size and a time that was set back (the kernel's own, ctime, cannot be) are all seen. Not seen is a change
by something that bypasses the kernel's times: the disk written to directly, or a network file system that lies.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger(__name__)

#: Times of change are no finer than some clocks' ticks, up to 2 s: of a file that changed only just, a second change
#: might leave no trace. Nothing is remembered of it yet.
SETTLED_SECONDS = 2.0


class FileMemo:
    """One small file in `folder` for each set of files; old ones are never in the way."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`folder` is made when it is first needed."""
        self._folder = folder
        self._clock = clock

    def recall(self, name: str, paths: Sequence[Path], compute: Callable[[], str]) -> str:
        """What `compute()` says of `paths` (one file or more): a line, computed now or remembered under `name`.

        A folder that cannot be written costs the computation at every call. Raises OSError if a file is not there.
        """
        before = _state(paths)
        place = self._folder / f"{name}-{hashlib.sha256(json.dumps(before).encode()).hexdigest()[:40]}"
        remembered = _read(place)
        if remembered is not None:
            return remembered
        newest_ns = max(max(state.modified_ns, state.changed_ns) for state in before.values())
        settled = newest_ns / 1e9 < self._clock() - SETTLED_SECONDS
        value = compute()
        if settled and _state(paths) == before:
            self._write(place, value)
        return value

    def _write(self, place: Path, value: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Processes that compute the same at the same time do not meet in one file.
            unfinished = place.with_suffix(f".{os.getpid()}")
            try:
                unfinished.write_text(value + "\n", encoding="utf-8")
                os.replace(unfinished, place)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            _log.info("%s is not remembered: %s", place.name, error)


class _State(NamedTuple):
    """What changes with a file."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


def _state(paths: Sequence[Path]) -> dict[str, _State]:
    """By path."""
    stats = {str(path.resolve()): path.stat() for path in paths}
    return {p: _State(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in sorted(stats.items())}


def _read(place: Path) -> str | None:
    """None if there is nothing, or not a whole line."""
    try:
        line, end, _ = place.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return line if end else None
