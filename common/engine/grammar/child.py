"""The worker's end of a compile process: starts it, talks to it, ends it. Knows no cache and no jobs."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, cast

from common.engine.grammar.frames import Frame, FrameReader, Tag, write_frame
from common.engine.grammar.limits import CompileLimits

_log = logging.getLogger(__name__)

_MODULE = "common.engine.grammar.compile_process"
#: It computes with one thread, and never on a device.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class CompileProcess:
    """One process, from its start to its end. For the thread that made it, but for `kill`, which is for any.

    What it says goes to `hear`, on a thread of its own, and last of all, once, None: it has ended. Jobs run in
    processes of their own, so that none of them is to blame. It dies with the thread that made it, as the kernel counts
    a parent's death.
    """

    def __init__(self, hear: Callable[[Frame | None], None]) -> None:
        """Returns before the process is up. Raises OSError if it cannot be started."""
        self._hear = hear
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The library writes warnings there, with pieces of what users sent.
            stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
        )
        # Always at it, so that neither side ever waits for the other to take what it has written.
        self._reader = threading.Thread(target=self._read, name="grammar-compiler-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def introduce(self, vocabulary: bytes, limits: CompileLimits) -> None:
        """What it needs before all jobs. Waits until it takes it, which it does when it has loaded the library."""
        self.send(Frame(Tag.LIMITS, payload=limits.to_json()))
        self.send(Frame(Tag.VOCABULARY, payload=vocabulary))

    def send(self, frame: Frame) -> None:
        """A process that has ended is told nothing; that it has is heard."""
        with contextlib.suppress(OSError):
            write_frame(cast(BinaryIO, self._process.stdin), frame)

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """End it, hear its last words and free what it held here."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            # What was buffered for a process that is gone.
            with contextlib.suppress(OSError):
                cast(BinaryIO, pipe).close()

    def _read(self) -> None:
        frames = FrameReader(cast(BinaryIO, self._process.stdout).fileno())
        while (heard := frames.read()) is not None:
            for frame in heard:
                self._hear(frame)
        self._hear(None)
