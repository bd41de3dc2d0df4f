"""Keeps child processes running: starts them, passes their output on line by line, starts them again with backoff.

It knows processes and nothing of what they do. A child lives in a process group of its own (Ctrl-C in the terminal
reaches only the supervisor, which then stops children in order) and dies with the supervisor.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from common.config import ERROR_PREFIX, EXIT_USAGE
from common.errors import ConfigError
from deploy.spawned import dying_with_me

#: For the last output of a dead child, should some process that left its group still hold the pipe.
OUTPUT_SECONDS = 2.0

#: Takes the child's name and one line of its output.
LineSink = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One child: what to run, and how long it may take to end by itself."""

    name: str
    command: tuple[str, ...]
    #: The whole environment of the child.
    env: Mapping[str, str]
    #: Seconds between SIGTERM and SIGKILL.
    grace: float


class Backoff:
    """Delays between restarts: doubling from `first` to `limit` seconds, afresh after `stable` seconds of life."""

    def __init__(self, first: float = 0.5, limit: float = 30.0, stable: float = 60.0) -> None:
        self._first = first
        self._limit = limit
        self._stable = stable
        self._next = first

    def after(self, uptime: float) -> float:
        """Seconds to wait before the next start, after a life of `uptime` seconds."""
        delay = self._first if uptime >= self._stable else self._next
        self._next = min(self._limit, 2 * delay)
        return delay


class ChildRefused(ConfigError):
    """A child left with exit code 2 at its first start: its options are wrong, so starting it again is useless."""


class Keeper:
    """One child process and its restarts. `start`, then `stop` (orderly) or `kill`; `done` ends with either."""

    def __init__(
        self,
        spec: ProcessSpec,
        on_line: LineSink,
        *,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.spec = spec
        #: Times the child was started.
        self.starts = 0
        self._on_line = on_line
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._sleep = sleep
        self._child: _Child | None = None
        self._stopping = asyncio.Event()
        self._reason = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two."""
        return self._child.pid if self._child else None

    @property
    def done(self) -> asyncio.Task[None]:
        """Ends when the child was stopped; with ChildRefused if it refuses its options; else never."""
        assert self._task is not None, f"{self.spec.name} was not started"
        return self._task

    def start(self) -> None:
        """Run the child from now on. Call once."""
        assert self._task is None, f"{self.spec.name} was started already"
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the grace time; returns when the process is gone. May be called again."""
        self._stopping.set()
        if self._task is None:
            return
        if self._child is None:
            self._task.cancel()
        elif not self._child.exited.done():
            _signal(os.kill, self._child.pid, signal.SIGTERM)
        await asyncio.wait([self._task], timeout=self.spec.grace)
        self.kill()
        await asyncio.wait([self._task])

    def kill(self) -> None:
        """SIGKILL to the child and all that it started, at once; it is not started again."""
        self._stopping.set()
        if self._child is not None:
            _signal(os.killpg, self._child.pid, signal.SIGKILL)
        elif self._task is not None:
            self._task.cancel()

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            born = self._clock()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            if code == EXIT_USAGE and self.starts == 1:
                raise ChildRefused(f"{self.spec.name} does not start: {self._reason or 'see its output'}")
            delay = self._backoff.after(self._clock() - born)
            because = f": {self._reason}" if self._reason else ""
            self._say(f"died ({_describe(code)}{because}); starting again in {delay:.1f} s")
            await self._sleep(delay)

    async def _run_once(self) -> int:
        self._reason = ""
        child = self._child = await _spawn(self.spec, self._on_output)
        self.starts += 1
        try:
            code = await child.exited
            # Nothing that it started may outlive it, nor keep the pipe open.
            _signal(os.killpg, child.pid, signal.SIGKILL)
            await asyncio.wait([child.closed], timeout=OUTPUT_SECONDS)
        finally:
            self._child = None
            child.close()
        return code

    def _on_output(self, line: str) -> None:
        if line.startswith(ERROR_PREFIX):
            self._reason = line.removeprefix(ERROR_PREFIX)
        else:
            self._say(line)

    def _say(self, line: str) -> None:
        self._on_line(self.spec.name, line)


class _Child(asyncio.SubprocessProtocol):
    """A running process: when it exits, when its output ends, and its output line by line.

    (`asyncio.subprocess.Process.wait` would not do: it waits for the pipe too, which a grandchild may hold.)
    """

    def __init__(self, on_output: Callable[[str], None]) -> None:
        self._on_output = on_output
        self._rest = b""
        loop = asyncio.get_running_loop()
        #: Exit code; minus the signal's number if one killed it.
        self.exited: asyncio.Future[int] = loop.create_future()
        #: Set when all output was passed on.
        self.closed: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self.pid = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._emit(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if self._rest:
            self._emit(self._rest)
        if not self.closed.done():
            self.closed.set_result(None)

    def process_exited(self) -> None:
        code = self._transport.get_returncode()
        assert code is not None
        if not self.exited.done():
            self.exited.set_result(code)

    def close(self) -> None:
        """Let go of the process (killing it if it still runs) and of its pipe."""
        self._transport.close()

    def _emit(self, line: bytes) -> None:
        self._on_output(line.decode(errors="replace").rstrip("\r"))


async def _spawn(spec: ProcessSpec, on_output: Callable[[str], None]) -> _Child:
    _, child = await asyncio.get_running_loop().subprocess_exec(
        lambda: _Child(on_output),
        *dying_with_me(spec.command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(spec.env),
        start_new_session=True,
    )
    return child


def _signal(send: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    """`send` (os.kill or os.killpg) a signal to a child that may just have gone."""
    try:
        send(pid, number)
    except ProcessLookupError:
        return


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
