"""Compiles grammars in a process that can be killed: `python -m common.engine.grammar.compile_process PARENT`.

This process loads library and vocabulary once and then only forks: each job runs in a child of its own, under limits of
its own, and starts within milliseconds. One of them runs at a time, by `Turns`; the others are stopped meanwhile. Ends
when its input does, and dies with its parent.
"""

import contextlib
import gc
import os
import select
import signal
import sys
from typing import BinaryIO

from common.engine.grammar.frames import Frame, FrameReader, Tag, write_frame
from common.engine.grammar.job_compiler import JobCompiler, Reply
from common.engine.grammar.job_process import JobProcess, die_with
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.turns import Turns
from common.engine.grammar.vocabulary import Vocabulary

#: Shortest wait for a slice to be used up: the processor's clock and the wall's do not go alike.
_SHORTEST_WAIT = 0.001
_CROWDED = b"too many grammars that take long to compile are waiting"


def serve(parent: int) -> None:
    """Take jobs on stdin and answer them on stdout, until the input ends; this process does nothing else."""
    die_with(parent)
    # Ctrl-C goes to the whole process group; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = _take_pipes()
    reader = FrameReader(source)
    given: list[Frame] = []
    while len(given) < 2:
        if (frames := reader.read()) is None:
            return
        given += frames
    limits = CompileLimits.from_json(given[0].payload)
    compiler = JobCompiler(Vocabulary.deserialize(given[1].payload), limits)
    # What is there now is never freed: collecting it in a child would only copy its pages.
    gc.collect()
    gc.freeze()
    jobs = Jobs(compiler, limits, sink)
    # A parent that is gone is noticed by reading.
    with contextlib.suppress(BrokenPipeError):
        write_frame(sink, Frame(Tag.READY))
        jobs.take(given[2:])
        _serve(source, reader, jobs)
    jobs.close()


def _take_pipes() -> tuple[int, BinaryIO]:
    """Stdin and stdout for frames; what the library prints goes to stderr."""
    source, sink = os.dup(0), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return source, sink


def _serve(source: int, reader: FrameReader, jobs: "Jobs") -> None:
    """Until the input ends. Waits for whatever comes first: frames, output of jobs, or the end of a turn."""
    while True:
        seconds = jobs.give_turn()
        ready, _, _ = select.select([source, *jobs.outputs], [], [], seconds)
        jobs.read(ready)
        if source in ready:
            if (frames := reader.read()) is None:
                return
            jobs.take(frames)


class Jobs:
    """The jobs that were sent and not answered yet, by number, and the processes of those that have begun."""

    def __init__(self, compiler: JobCompiler, limits: CompileLimits, sink: BinaryIO) -> None:
        """Answers are written to `sink`; it raises BrokenPipeError through all methods if nobody reads them."""
        self._compiler = compiler
        self._limits = limits
        self._sink = sink
        self._turns = Turns(slice_seconds=limits.slice_seconds, max_kept=limits.max_kept, max_heavy=limits.max_heavy)
        self._sources: dict[int, bytes] = {}
        self._processes: dict[int, JobProcess] = {}
        #: The job whose process is not stopped.
        self._running: int | None = None

    @property
    def outputs(self) -> list[int]:
        """Pipes on which jobs answer."""
        return [process.output for process in self._processes.values()]

    def take(self, frames: list[Frame]) -> None:
        for tag, job, payload in frames:
            if tag is Tag.COMPILE:
                self._sources[job] = payload
                self._turns.add(job)
            elif tag is Tag.CANCEL and job in self._turns:
                self._drop(job)

    def read(self, ready: list[int]) -> None:
        """Take what jobs have written to these of their pipes, and answer those that have ended."""
        for job, process in list(self._processes.items()):
            if process.output in ready and not process.read():
                del self._processes[job]
                self._answer(job, process.reply())

    def give_turn(self) -> float | None:
        """Let the job run whose turn it is, and no other. Seconds until that is to be looked at again; None: never."""
        self._charge()
        job = self._turns.next()
        if job != self._running and self._running is not None:
            self._processes[self._running].pause()
        if job != self._running and job is not None:
            self._resume(job)
        self._running = job
        if job is None:
            return None
        left = self._limits.wall_seconds - self._processes[job].wall_seconds
        return max(_SHORTEST_WAIT, min(self._turns.left(job), left))

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _charge(self) -> None:
        """Note what the running job has used, and end whoever there is no time or no room for."""
        if self._running is None:
            return
        process = self._processes[self._running]
        if process.wall_seconds >= self._limits.wall_seconds:
            words = f"not compiled within {self._limits.wall_seconds:g} s: the machine is busy"
            self._give_up(self._running, words.encode())
            return
        self._turns.note(self._running, process.cpu_seconds)
        if (surplus := self._turns.surplus()) is not None:
            self._give_up(surplus, _CROWDED)
        if (job := self._turns.to_restart()) is not None:
            self._end_process(job)
            self._turns.restart(job)

    def _resume(self, job: int) -> None:
        if job in self._processes:
            self._processes[job].resume()
        else:
            self._processes[job] = JobProcess(self._compiler, self._limits, self._sources[job])

    def _give_up(self, job: int, words: bytes) -> None:
        self._drop(job)
        write_frame(self._sink, Frame(Tag.STARVED, job, words))

    def _answer(self, job: int, reply: Reply) -> None:
        self._drop(job)
        write_frame(self._sink, Frame(reply[0], job, reply[1]))

    def _drop(self, job: int) -> None:
        """Forget a job; if it has a process, nobody wants what comes of it."""
        self._end_process(job)
        self._turns.remove(job)
        del self._sources[job]

    def _end_process(self, job: int) -> None:
        """If it has one."""
        if (process := self._processes.pop(job, None)) is not None:
            process.kill()
        if job == self._running:
            self._running = None


if __name__ == "__main__":
    serve(int(sys.argv[1]))
