"""What the kernel says of processes. Linux only, as what is tested with it."""

import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Not gone, and no zombie that waits to be noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    """Of its main thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descriptors() -> int:
    """Open ones of this process."""
    return descriptors_of(os.getpid())


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
