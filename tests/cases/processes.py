"""What Linux tells of processes: memory, compute time, parents. Everything may be gone at any moment."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

#: Fields of /proc/PID/stat, counted from the state.
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 0, 1, 11, 12, 21


def is_running(pid: int) -> bool:
    """A zombie has ended."""
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] != "Z"


def resident_bytes(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[_RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def descendants(roots: Iterable[int]) -> set[int]:
    """`roots` and all that they have started."""
    parents = {int(pid): _stat(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()}
    found = set(roots)
    while more := {pid for pid, fields in parents.items() if fields and int(fields[_PARENT]) in found} - found:
        found |= more
    return found


def busy_processors(roots: Iterable[int]) -> float:
    """How many processors they and what they started keep busy, measured over half a second."""
    pids = set(roots)
    before = _ticks(pids)
    threading.Event().wait(0.5)
    return (_ticks(pids) - before) / os.sysconf("SC_CLK_TCK") / 0.5


def _ticks(roots: Iterable[int]) -> int:
    stats = [fields for pid in descendants(roots) if (fields := _stat(pid))]
    return sum(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]) for fields in stats)


def _stat(pid: int) -> list[str]:
    """Empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
