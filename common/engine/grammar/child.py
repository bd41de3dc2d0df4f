"""The worker's end of a compile process: starts it, talks to it, starts it again. Knows no cache and no queue."""

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
from typing import IO, BinaryIO, cast

from common.engine.grammar.frames import Tag, read_frame, write_frame
from common.engine.grammar.limits import CompileLimits

_log = logging.getLogger(__name__)

_MODULE = "common.engine.grammar.compile_process"
#: Loading the library takes seconds; on a machine that is busy loading models, many.
_START_SECONDS = 120.0
#: Beyond a job's own wall limit, which the process itself watches.
_ANSWER_SECONDS = 30.0
#: It computes with one thread, and never on a device.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class ProcessLost(Exception):
    """The process ended or does not answer. Not the doing of the job: jobs run in processes of their own."""


class CompileProcess:
    """At most one process at a time. `ask` and `ensure_started` are for one thread; `kill` for any.

    The process dies with that thread, as the kernel counts a parent's death.
    """

    def __init__(self, vocabulary: bytes, limits: CompileLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        #: Guards `_process` and `_killed`, so that none is started after `kill`.
        self._lock = threading.Lock()
        self._killed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ensure_started(self) -> None:
        """Start it and wait until it takes jobs. Raises ProcessLost if it cannot be, or after `kill`."""
        if self._process is not None and self._process.poll() is None:
            return
        self._drop()
        source, sink = self._spawn()
        try:
            write_frame(sink, Tag.LIMITS, self._limits.to_json())
            write_frame(sink, Tag.VOCABULARY, self._vocabulary)
        except OSError as error:
            raise self._lost(f"it ended while it started: {error}") from error
        self._read(source, _START_SECONDS)

    def ask(self, job: bytes) -> tuple[Tag, bytes]:
        """The answer to a COMPILE frame. Raises ProcessLost; `ensure_started` may then mend it."""
        process = self._process
        assert process is not None, "asked before it was started"
        try:
            write_frame(cast(BinaryIO, process.stdin), Tag.COMPILE, job)
        except OSError as error:
            raise self._lost(f"it takes no jobs: {error}") from error
        return self._read(process.stdout, self._limits.wall_seconds + _ANSWER_SECONDS)

    def kill(self) -> None:
        """End it for good, whatever it does."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End it and free what it held here; by the thread that asks."""
        self.kill()
        self._drop()

    def _spawn(self) -> tuple[BinaryIO, BinaryIO]:
        with self._lock:
            if self._killed:
                raise ProcessLost("the worker is stopping")
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # The library writes warnings there, with pieces of what users sent.
                stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
            )
            return cast(BinaryIO, self._process.stdout), cast(BinaryIO, self._process.stdin)

    def _read(self, source: IO[bytes] | None, seconds: float) -> tuple[Tag, bytes]:
        assert source is not None
        poll = select.poll()
        poll.register(source, select.POLLIN)
        frame = read_frame(cast(BinaryIO, source)) if poll.poll(seconds * 1000) else None
        if frame is None:
            raise self._lost("it ended, or does not answer")
        return frame

    def _lost(self, why: str) -> ProcessLost:
        self._drop()
        return ProcessLost(f"the compile process was lost: {why}")

    def _drop(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # What was buffered for a process that is gone.
                with contextlib.suppress(OSError):
                    pipe.close()
