"""The worker's end of a compile process: talks to it, ends it. Knows no cache and no jobs."""

import contextlib
import threading
from collections.abc import Callable
from typing import BinaryIO, cast

from common.engine.grammar.frames import Frame, FrameReader, Tag, write_frame
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.start import Process


class CompileProcess:
    """One process, from its start to its end. For the thread that made it, but for `kill`, which is for any.

    What it says goes to `hear`, on a thread of its own, and last of all, once, None: it has ended. Jobs run in
    processes of their own, so that none of them is to blame.
    """

    def __init__(self, process: Process, hear: Callable[[Frame | None], None]) -> None:
        self._hear = hear
        self._process = process
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
