"""The engine loop, driven by engines that block and report through events; no sleeps."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from common.engine.loop import EngineLoop, EngineStopped

LONG = 10.0


class ScriptedEngine:
    """Logs what happens; `work` steps have something to do, each passing through `on_step`."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.work = 0
        self.deadline: float | None = None
        self.on_step: Callable[[], None] = lambda: None
        self.on_handle: Callable[[object], None] = lambda command: None
        self.idle = threading.Event()
        self.threads: set[str] = set()

    def handle(self, command: object) -> None:
        self.threads.add(threading.current_thread().name)
        self.log.append(command)
        self.on_handle(command)

    def step(self) -> bool:
        self.threads.add(threading.current_thread().name)
        self.log.append("step")
        self.on_step()
        if self.work:
            self.work -= 1
            return True
        return False

    def next_deadline(self) -> float | None:
        self.idle.set()
        return self.deadline


class Harness:
    """A loop over a scripted engine, with what it reported."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.fatal: list[BaseException] = []
        self.fatal_called = threading.Event()
        self.stalls: list[float] = []
        self.stalled = threading.Event()
        self.loop = self.make()

    def make(self, watchdog_seconds: float = LONG) -> EngineLoop:
        self.loop = EngineLoop(
            self.engine,
            name="engine-under-test",
            on_fatal=self._on_fatal,
            watchdog_seconds=watchdog_seconds,
            on_stall=self._on_stall,
        )
        return self.loop

    def _on_fatal(self, exc: BaseException) -> None:
        self.fatal.append(exc)
        self.fatal_called.set()

    def _on_stall(self, seconds: float) -> None:
        self.stalls.append(seconds)
        self.stalled.set()

    def start_and_idle(self) -> None:
        self.loop.start()
        assert self.engine.idle.wait(LONG)
        self.engine.log.clear()

    def sync(self) -> None:
        """Return when all commands posted before were handled."""
        self.loop.call(lambda: None).result(LONG)


@pytest.fixture
def h() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    assert harness.loop.stop(LONG)
    leftovers = [t.name for t in threading.enumerate() if t.name.startswith("engine-under-test")]
    assert leftovers == []


class Gate:
    """A place where the engine thread waits until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, *_: object) -> None:
        self.entered.set()
        assert self.open.wait(LONG)


def test_commands_are_handled_in_order_on_the_engine_thread_and_followed_by_a_step(h: Harness) -> None:
    h.start_and_idle()
    for number in range(3):
        h.loop.post(number)
    h.sync()
    assert h.loop.stop(LONG)
    assert [entry for entry in h.engine.log if entry != "step"] == [0, 1, 2]
    assert h.engine.threads == {"engine-under-test"}


def test_all_pending_commands_come_before_the_next_step(h: Harness) -> None:
    gate = Gate()
    h.engine.on_step = gate
    h.engine.work = 1
    h.loop.start()
    assert gate.entered.wait(LONG)
    for number in range(5):
        h.loop.post(number)
    gate.open.set()
    h.sync()
    assert h.engine.log[:6] == ["step", 0, 1, 2, 3, 4]


def test_it_steps_while_there_is_work_and_then_sleeps(h: Harness) -> None:
    h.engine.work = 7
    h.loop.start()
    assert h.engine.idle.wait(LONG)
    assert h.engine.log == ["step"] * 8


def test_a_command_wakes_an_idle_engine(h: Harness) -> None:
    h.start_and_idle()
    h.engine.idle.clear()
    h.loop.post("hello")
    assert h.engine.idle.wait(LONG)
    assert h.engine.log == ["hello", "step"]


@pytest.mark.parametrize("deadline", [0.01, 0.0, -1.0])
def test_an_idle_engine_is_stepped_at_its_deadline(h: Harness, deadline: float) -> None:
    stepped_again = threading.Event()

    def on_step() -> None:
        if len(h.engine.log) == 2:
            h.engine.deadline = None
            stepped_again.set()

    h.engine.on_step = on_step
    h.engine.deadline = deadline
    h.loop.start()
    assert stepped_again.wait(LONG)


def test_commands_posted_before_the_start_are_kept(h: Harness) -> None:
    h.loop.post("early")
    h.loop.start()
    h.sync()
    assert h.engine.log[0] == "early"


def test_a_flood_of_commands_does_not_keep_the_engine_from_stepping(h: Harness) -> None:
    stepped = threading.Event()

    def repost(command: object) -> None:
        if not stepped.is_set():
            h.loop.post(command)

    h.engine.on_handle = repost
    h.start_and_idle()
    h.engine.on_step = stepped.set
    h.loop.post("again")
    assert stepped.wait(LONG)


def test_a_call_runs_on_the_engine_thread_in_order_with_commands(h: Harness) -> None:
    h.start_and_idle()
    h.loop.post("before")
    future = h.loop.call(lambda: (threading.current_thread().name, list(h.engine.log)))
    name, log = future.result(LONG)
    assert name == "engine-under-test"
    assert "before" in log


def test_what_a_call_raises_goes_to_its_caller_and_not_to_the_engine(h: Harness) -> None:
    h.start_and_idle()
    with pytest.raises(ZeroDivisionError):
        h.loop.call(lambda: 1 // 0).result(LONG)
    h.sync()
    assert h.loop.alive
    assert h.fatal == []


def test_a_cancelled_call_does_not_run(h: Harness) -> None:
    gate = Gate()
    h.engine.on_handle = gate
    h.start_and_idle()
    h.loop.post("block")
    assert gate.entered.wait(LONG)
    ran = threading.Event()
    future = h.loop.call(ran.set)
    assert future.cancel()
    gate.open.set()
    h.sync()
    assert not ran.is_set()
    with pytest.raises(CancelledError):
        future.result(LONG)


@pytest.mark.parametrize("where", ["on_step", "on_handle"])
def test_an_engine_bug_is_reported_once_and_ends_the_thread(h: Harness, where: str) -> None:
    def explode(*_: object) -> None:
        raise AssertionError("7 blocks are owned by nobody")

    setattr(h.engine, where, explode)
    h.loop.post("go")
    waiting = h.loop.call(lambda: None) if where == "on_handle" else None
    h.loop.start()
    assert h.fatal_called.wait(LONG)
    assert h.loop.stop(LONG)
    assert [str(exc) for exc in h.fatal] == ["7 blocks are owned by nobody"]
    assert not h.loop.alive
    if waiting is not None:
        with pytest.raises(EngineStopped):
            waiting.result(LONG)


def test_calls_after_the_end_fail_and_posts_are_dropped(h: Harness) -> None:
    h.start_and_idle()
    assert h.loop.stop(LONG)
    h.loop.post("late")
    with pytest.raises(EngineStopped):
        h.loop.call(lambda: None).result(LONG)
    assert h.engine.log == []
    assert not h.loop.alive


def test_stop_finishes_the_step_and_drops_what_waits(h: Harness) -> None:
    gate = Gate()
    h.engine.on_step = gate
    h.engine.work = 100
    h.loop.start()
    assert gate.entered.wait(LONG)
    h.loop.post("never")
    call = h.loop.call(lambda: None)
    assert not h.loop.stop(0.0)
    gate.open.set()
    assert h.loop.stop(LONG)
    assert h.engine.log == ["step"]
    with pytest.raises(EngineStopped):
        call.result(LONG)
    assert h.fatal == []


def test_a_loop_that_never_started_stops_and_fails_its_calls(h: Harness) -> None:
    call = h.loop.call(lambda: None)
    assert h.loop.stop(LONG)
    with pytest.raises(EngineStopped):
        call.result(LONG)
    assert not h.loop.alive


def test_the_engine_may_stop_and_post_to_its_own_loop(h: Harness) -> None:
    def on_handle(command: object) -> None:
        if command == "first":
            h.loop.post("second")
        else:
            h.loop.stop()

    h.engine.on_handle = on_handle
    h.start_and_idle()
    h.loop.post("first")
    h.loop._thread.join(LONG)
    assert [entry for entry in h.engine.log if entry != "step"] == ["first", "second"]
    assert not h.loop.alive


@pytest.mark.parametrize("where", ["on_step", "on_handle"])
def test_the_watchdog_reports_a_step_or_command_that_does_not_end_once(h: Harness, where: str) -> None:
    h.make(watchdog_seconds=0.02)
    gate = Gate()
    setattr(h.engine, where, gate)
    h.loop.post("go")
    h.loop.start()
    assert gate.entered.wait(LONG)
    # On a crowded machine whatever ran before the gate may have been reported, too.
    before = len(h.stalls)
    while h.loop.stalled_for() < 0.1:
        h.stalled.wait(0.01)
    assert h.stalled.wait(LONG)
    assert len(h.stalls) - before <= 1
    assert h.stalls[-1] > 0.02
    gate.open.set()


def test_an_idle_engine_is_not_stalled(h: Harness) -> None:
    h.make(watchdog_seconds=0.02)
    h.start_and_idle()
    while h.loop.stalled_for() > 0.0:
        pass
    h.stalled.clear()
    assert not h.stalled.wait(0.1)


def test_only_an_idle_or_ended_loop_reports_no_stall_time(h: Harness) -> None:
    gate = Gate()
    h.engine.on_step = gate
    h.loop.start()
    assert gate.entered.wait(LONG)
    assert h.loop.stalled_for() > 0.0
    gate.open.set()
    assert h.loop.stop(LONG)
    assert h.loop.stalled_for() == 0.0
