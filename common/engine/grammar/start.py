"""How a compile process comes to be: forked from a worker in which nothing runs yet, or started by itself.

The first one is forked: it is up at once, and shares with the worker what both have loaded. One that takes the place of
a lost one is started: that loads the library for seconds, and holds it a second time.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import IO, BinaryIO, NoReturn, Protocol

from common.engine.grammar import compile_process

_log = logging.getLogger(__name__)

_MODULE = compile_process.__name__
#: It computes with one thread, and never on a device.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class Process(Protocol):
    """A `subprocess.Popen`, or what can stand for it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    def kill(self) -> None: ...
    def wait(self) -> object: ...


def start_process() -> Process:
    """Returns before it is up. It dies with the thread that calls this, as the kernel counts a parent's death.

    Raises OSError if it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if _is_quiet() else None,
        env={**os.environ, **_ENVIRONMENT},
    )


def fork_process() -> "ForkedProcess | None":
    """To be called by the main thread, before it starts others.

    None if there are others already (some tracers and debuggers start theirs before everything else): a fork takes none
    of them along, only the locks they hold. None elsewhere than on Linux, too, where system libraries do not stand a
    fork.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return None
    parent, quiet = os.getpid(), _is_quiet()
    source, stdin = os.pipe()
    stdout, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(stdin)
        os.close(stdout)
        _serve(parent, source, sink, quiet=quiet)
    os.close(source)
    os.close(sink)
    return ForkedProcess(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))


@dataclass(eq=False)
class ForkedProcess:
    """What is used of a `subprocess.Popen`, of a process that was forked. `kill` may be called from any thread."""

    pid: int
    stdin: BinaryIO
    stdout: BinaryIO
    _ended: bool = False
    #: From when the kernel forgets the process until that is noted here its number is nobody's, or another's.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def kill(self) -> None:
        with self._lock:
            if not self._ended:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until it has ended; its number may be another's afterwards."""
        if self._ended:
            return
        # It stays a zombie, which may be killed.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            os.waitpid(self.pid, 0)
            self._ended = True

    def discard(self) -> None:
        """End it unused."""
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()


def _serve(parent: int, source: int, sink: int, *, quiet: bool) -> NoReturn:
    """Never goes back into what the worker was doing."""
    code = 1
    try:
        os.environ.update(_ENVIRONMENT)
        os.dup2(source, 0)
        os.dup2(sink, 1)
        os.close(source)
        os.close(sink)
        if quiet:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 2)
        compile_process.serve(parent)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _is_quiet() -> bool:
    """The library writes warnings to stderr, with pieces of what users sent."""
    return not _log.isEnabledFor(logging.DEBUG)
