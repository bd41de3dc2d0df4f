"""Become another program that dies with the process that started it: `python -I -S spawned.py PARENT COMMAND...`.

Started bare (standard library only), it asks the kernel for SIGKILL at the parent's death, which survives the exec
that follows, so that even a supervisor killed with -9 leaves nothing behind. Elsewhere than on Linux it only execs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def dying_with_me(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command line that runs `command` as a child which does not outlive the calling process."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # It died before we asked: nobody would ever tell us.
        if os.getppid() != int(parent):
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
