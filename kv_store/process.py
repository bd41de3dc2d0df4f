"""Which process a peer is, and whether that process is provably dead.

Only a peer on the same kernel and in the same pid namespace can be proved dead from here; everybody else is
never "dead", whatever timed out.
"""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
#: Fields of /proc/<pid>/stat after the command name, counted from 0: state, ..., starttime.
_STATE, _START_TIME = 0, 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid (where the kernel tells us)."""

    host_id: str
    pid: int
    #: Clock ticks after boot; 0 where there is no /proc.
    start: int

    @classmethod
    def own(cls) -> "ProcessId":
        stat = _stat(os.getpid())
        return cls(host_id(), os.getpid(), int(stat[_START_TIME]) if stat else 0)

    def is_visible(self) -> bool:
        """Whether the death of this process can be seen from here."""
        return self.pid > 0 and self.host_id == host_id()

    def is_dead(self) -> bool:
        """True only if this process certainly runs no more; False when alive or when nobody here can know."""
        if not self.is_visible():
            return False
        if self.start == 0:
            return not _exists(self.pid)
        stat = _stat(self.pid)
        if stat is None or int(stat[_START_TIME]) != self.start:
            return True
        return stat[_STATE] in "ZX" and not _has_other_threads(self.pid)


def host_id() -> str:
    """Equal for two processes only if they see each other under the same pids."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{os.readlink(_PID_NAMESPACE)}"
    except OSError:
        return f"node-{uuid.getnode():x}"


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    return text[text.rindex(")") + 1 :].split()


def _has_other_threads(pid: int) -> bool:
    """A killed process is a zombie from when its first thread ends; others may still be inside the kernel."""
    try:
        return any(int(task) != pid for task in os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
