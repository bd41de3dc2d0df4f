"""One engine thread: commands in, steps in between, a watchdog beside it.

The thread owns everything the engine touches; others reach it by `post` and `call` only. Events go out by
whatever callbacks the engine was built with. Knows nothing of requests, asyncio or gRPC.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Engine(Protocol):
    """What the loop drives. All methods run on the engine thread; an exception from any ends the loop."""

    def handle(self, command: object) -> None:
        """Take in one posted command."""

    def step(self) -> bool:
        """Do one iteration. False: nothing can run before a command comes or the deadline passes."""

    def next_deadline(self) -> float | None:
        """Seconds until it wants to be stepped though idle; None: never. Asked only when a step did nothing."""


class EngineStopped(Exception):
    """The engine thread has ended, so that a call will never run."""


@dataclass(frozen=True, slots=True)
class _Command:
    command: object


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    fn: Callable[[], T]
    future: Future[T]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.fn()
        except BaseException as exc:
            self.future.set_exception(exc)
        else:
            self.future.set_result(result)


class _Wake:
    """Ends a wait without asking for anything."""


class EngineLoop:
    """Runs `engine` on a thread of its own.

    Before each step all commands that are pending are handled, in the order of posting. While `step` returns
    False the thread sleeps until a command or the engine's deadline. If engine code raises, `on_fatal` is called
    once, on the engine thread, and the thread ends: an engine with a bug must take its process down, not hang.
    `on_stall` is called, on the watchdog's thread, once for each step (or command) that runs longer than
    `watchdog_seconds`, with its age in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        on_fatal: Callable[[BaseException], None],
        watchdog_seconds: float = 60.0,
        on_stall: Callable[[float], None] | None = None,
    ) -> None:
        assert watchdog_seconds > 0, f"watchdog of {watchdog_seconds} s"
        self._engine = engine
        self._on_fatal = on_fatal
        self._on_stall = on_stall
        self._watchdog_seconds = watchdog_seconds
        self._inbox: SimpleQueue[_Command | _Call[object] | _Wake] = SimpleQueue()
        #: Guards `_closed`, so that nothing enters the inbox after its last reading. Never held for long.
        self._door = threading.Lock()
        self._closed = False
        self._stopping = threading.Event()
        #: (number, monotonic start) of what the engine thread is doing; None while it waits.
        self._turn: tuple[int, float] | None = None
        self._num_turns = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name=f"{name}-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()
        if self._on_stall is not None:
            self._watchdog.start()

    def post(self, command: object) -> None:
        """Hand a command to the engine, from any thread; never blocks. Dropped if the loop has ended."""
        self._put(_Command(command))

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run `fn` on the engine thread between steps, in order with commands.

        What it raises goes into the future and does not end the loop. If the loop has ended, or ends first,
        the future fails with `EngineStopped`.
        """
        future: Future[T] = Future()
        if not self._put(_Call(fn, future)):
            future.set_exception(EngineStopped("the engine loop has ended"))
        return future

    def stop(self, timeout: float | None = None) -> bool:
        """Finish the current step and end the thread; commands still waiting are dropped, calls fail.

        Returns False if the thread is still in its step after `timeout` seconds. Idempotent.
        """
        self._stopping.set()
        self._put(_Wake())
        for thread in (self._thread, self._watchdog):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout)
        if self._thread.ident is None:
            self._close()
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs and still takes commands."""
        return self._thread.is_alive() and not self._closed

    def stalled_for(self) -> float:
        """Seconds that the current step or command has been running; 0 while the engine waits."""
        turn = self._turn
        return time.monotonic() - turn[1] if turn is not None else 0.0

    # --- engine thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._handle_pending()
                if not self._stopping.is_set() and not self._step():
                    self._wait()
        except BaseException as exc:
            self._end()
            self._on_fatal(exc)
        else:
            self._end()

    def _handle_pending(self) -> None:
        # As many as wait now: a flood of commands must not keep the engine from stepping.
        for _ in range(self._inbox.qsize()):
            if self._stopping.is_set():
                return
            self._handle(self._inbox.get_nowait())

    def _handle(self, item: _Command | _Call[object] | _Wake) -> None:
        self._begin_turn()
        if isinstance(item, _Command):
            self._engine.handle(item.command)
        elif isinstance(item, _Call):
            item.run()

    def _step(self) -> bool:
        self._begin_turn()
        return self._engine.step()

    def _wait(self) -> None:
        deadline = self._engine.next_deadline()
        self._turn = None
        try:
            item = self._inbox.get(timeout=None if deadline is None else max(deadline, 0.0))
        except Empty:
            return
        if not self._stopping.is_set():
            self._handle(item)
        elif isinstance(item, _Call):
            _refuse(item)

    def _begin_turn(self) -> None:
        self._num_turns += 1
        self._turn = (self._num_turns, time.monotonic())

    def _end(self) -> None:
        self._turn = None
        self._stopping.set()
        self._close()

    # --- any thread ---------------------------------------------------------------------------------

    def _put(self, item: _Command | _Call[T] | _Wake) -> bool:
        with self._door:
            if self._closed:
                return False
            self._inbox.put(item)  # type: ignore[arg-type]  # Future is invariant; the loop never reads results
            return True

    def _close(self) -> None:
        with self._door:
            self._closed = True
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, _Call):
                _refuse(item)

    # --- watchdog thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._on_stall is not None
        reported = 0
        while not self._stopping.wait(self._watchdog_seconds / 4):
            turn = self._turn
            if turn is None or turn[0] == reported:
                continue
            age = time.monotonic() - turn[1]
            if age > self._watchdog_seconds:
                reported = turn[0]
                self._on_stall(age)


def _refuse(call: _Call[object]) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(EngineStopped("the engine loop ended before the call ran"))
