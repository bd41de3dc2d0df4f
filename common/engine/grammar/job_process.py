"""A compile job in a process of its own: begun, made to wait and go on, ended, read. Decides nothing of when."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

from common.engine.grammar.frames import Tag
from common.engine.grammar.job_compiler import JobCompiler, Reply
from common.engine.grammar.limits import CompileLimits

_PR_SET_PDEATHSIG = 1
#: Half of what a thread of the worker has: what fits here fits there.
_STACK_BYTES = 4 << 20
#: No job ends with these by itself; the kernel sends SIGKILL when the machine has no memory left.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
_READ_BYTES = 1 << 20


class JobProcess:
    """A fork of this process, which must have no other threads. It has its turn at first.

    A job takes nothing with it when it is killed, runs out of memory or crashes. It dies with this process.
    """

    def __init__(self, compiler: JobCompiler, limits: CompileLimits, job: bytes) -> None:
        self._limits = limits
        self._parts: list[bytes] = []
        #: Seconds on the clock with its turn, and time.monotonic() when the present turn began.
        self._ran = 0.0
        self._resumed: float | None = time.monotonic()
        parent = os.getpid()
        #: Readable when there is something for `read`.
        self.output, child_output = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _run(parent, child_output, compiler, limits, job)
        os.close(child_output)
        self._clock = _cpu_clock(self._pid)

    @property
    def cpu_seconds(self) -> float:
        """Processor time since its start."""
        return self.wall_seconds if self._clock is None else time.clock_gettime(self._clock)

    @property
    def wall_seconds(self) -> float:
        """Time on the clock since its start, but for that in which it waited."""
        return self._ran + (0.0 if self._resumed is None else time.monotonic() - self._resumed)

    def pause(self) -> None:
        """It keeps what it has done so far, and computes nothing."""
        self._ran, self._resumed = self.wall_seconds, None
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        self._resumed = time.monotonic()
        os.kill(self._pid, signal.SIGCONT)

    def read(self) -> bool:
        """Take what it has written, waiting if that is nothing. False: that was all, it has ended."""
        part = os.read(self.output, _READ_BYTES)
        self._parts.append(part)
        return bool(part)

    def reply(self) -> Reply:
        """What came of it, once it has ended. Nothing of it is left afterwards."""
        # It may have been stopped between its last word and its end.
        status = self._reap(signal.SIGCONT)
        answer = b"".join(self._parts)
        if status == 0 and answer:
            return Tag(answer[0]), answer[1:]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _FROM_OUTSIDE:
            return Tag.STARVED, b"not compiled: something else ended the compiler, the machine may be out of memory"
        return Tag.REFUSED, self._words_for(status).encode()

    def kill(self) -> None:
        """End it wherever it is. Nothing of it is left afterwards."""
        self._reap(signal.SIGKILL)

    def _reap(self, number: signal.Signals) -> int:
        """Nobody has waited for it yet, so the pid is still its own."""
        os.kill(self._pid, number)
        os.close(self.output)
        return os.waitpid(self._pid, 0)[1]

    def _words_for(self, status: int) -> str:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGPROF:
                return f"too complex: it takes more than {self._limits.cpu_seconds:g} s to compile"
            return f"too complex: the compiler ended with {signal.Signals(number).name}"
        return "too complex: the compiler failed"


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies. Elsewhere than on Linux the end of the input has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It died before we asked: nobody would ever tell us.
        if os.getppid() != parent:
            sys.exit(1)


def _cpu_clock(pid: int) -> int | None:
    """The clock of that process' compute time, for `time.clock_gettime`; None where there is no such thing."""
    clock = ctypes.c_int()
    with contextlib.suppress(AttributeError):
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) == 0:
            return clock.value
    return None


# --- in the child -------------------------------------------------------------------------------------


def _run(parent: int, output: int, compiler: JobCompiler, limits: CompileLimits, job: bytes) -> None:
    """Ends the process, whatever happens: nothing of the parent's may run twice."""
    status = 1
    try:
        die_with(parent)
        _limit_this_process(limits)
        tag, payload = compiler.compile(job)
        with os.fdopen(output, "wb") as stream:
            stream.write(bytes([tag]) + payload)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _limit_this_process(limits: CompileLimits) -> None:
    if sys.platform == "linux":
        most = _address_space() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Kills by SIGPROF, in the library's code too.
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)


def _address_space() -> int:
    """Bytes of this process, mapped or not."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
