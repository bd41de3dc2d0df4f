"""From a grammar's source to a grammar, without waiting for it and whatever the source is.

Who waits for which source, what is kept, and what the compile process is told. Knows nothing of requests, nor of whose
turn it is to be compiled.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from common.engine.grammar.cache import GrammarCache, digest
from common.engine.grammar.child import CompileProcess
from common.engine.grammar.frames import Frame, Tag
from common.engine.grammar.grammar import Grammar
from common.engine.grammar.job_compiler import encode_job
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.start import ForkedProcess, start_process
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest, Overloaded, TandemError
from common.sampling import GrammarSpec

_log = logging.getLogger(__name__)

#: Seconds after which a full queue, or a compiler that had to be started again, may have room.
_RETRY_AFTER = 2.0
_NO_VOCABULARY = "this worker's model takes no grammars: it has no tokenizer, or no end token"
#: Loading the library takes seconds; on a machine that is busy loading models, many.
_START_SECONDS = 120.0
#: How often a job is sent: the process may be lost under it, or have been lost while it had nothing to do.
_MOST_SENDS = 2


class _Job:
    """A source, and all that wait for it."""

    def __init__(self, number: int, key: bytes, spec: GrammarSpec) -> None:
        self.number = number
        self.key = key
        self.spec = spec
        self.waiting: list[Future[Grammar]] = []
        #: How many processes it was sent to, and whether the present one is among them.
        self.num_sends = 0
        self.sent = False

    @property
    def abandoned(self) -> bool:
        return all(future.cancelled() for future in self.waiting)


class GrammarCompiler:
    """Compiles grammars in a process that can be lost, each under limits of its own; heavy ones let others pass.

    Answers are kept, refusals too: a source that is sent again is answered at once. Those who ask for the same source
    at the same time wait for one job. All methods may be called from any thread.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        *,
        on_fatal: Callable[[BaseException], None],
        first_process: ForkedProcess | None = None,
        limits: CompileLimits | None = None,
        max_waiting: int = 64,
        cache_bytes: int = 256 << 20,
    ) -> None:
        """
        Args:
            vocabulary: None if the model has none that grammars could be about; each is refused then.
            on_fatal: called on the compiler's thread with the bug that ends it.
            first_process: one that is there already; from now on the compiler's, to be ended by `close`.
            max_waiting: sources that are waited for, under way or not.
            cache_bytes: memory for answers.
        """
        self._vocabulary = vocabulary
        self._serialized_vocabulary = b"" if vocabulary is None else vocabulary.serialize()
        self._on_fatal = on_fatal
        self._limits = limits or CompileLimits()
        self._max_waiting = max_waiting
        #: While there are jobs the process says something at least this often: it may be starting, and those that have
        #: begun, one new one among them, cannot all go on for longer.
        self._silent_seconds = _START_SECONDS + (self._limits.max_kept + 1) * self._limits.wall_seconds
        self._numbers = itertools.count(1)
        #: Guards all below; notified when the thread may have something to do.
        self._lock = threading.Condition()
        self._cache = GrammarCache(cache_bytes)
        #: By digest, oldest first.
        self._jobs: dict[bytes, _Job] = {}
        #: What the process has said, None for its end.
        self._heard: deque[Frame | None] = deque()
        self._first_process = first_process
        self._process: CompileProcess | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the compile process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start thread and process, once; does not wait for them. Jobs may be handed in before."""
        if self._vocabulary is not None:
            self._thread.start()

    def compile(self, spec: GrammarSpec) -> "Future[Grammar]":
        """The grammar of a source.

        The future fails with InvalidRequest, naming `grammar`, if the source is wrong or too complex; with Overloaded
        if too many are waiting, or the compiler cannot run just now. It may be cancelled: a source that nobody waits
        for any more is not compiled, not even to its end.
        """
        future: Future[Grammar] = Future()
        if self._vocabulary is None:
            return _failed(future, InvalidRequest(_NO_VOCABULARY, field="grammar"))
        key = digest(spec.kind.value.encode(), spec.source.encode(errors="surrogatepass"))
        with self._lock:
            if self._closed:
                return _failed(future, Overloaded("this worker is stopping"))
            if (entry := self._cache.get(key)) is not None:
                return _settled(future, entry)
            job = self._jobs.get(key)
            if job is None:
                if sum(not job.abandoned for job in self._jobs.values()) >= self._max_waiting:
                    return _failed(future, Overloaded("too many grammars are waiting", retry_after=_RETRY_AFTER))
                job = self._jobs[key] = _Job(next(self._numbers), key, spec)
            job.waiting.append(future)
            self._lock.notify()
        future.add_done_callback(self._note_cancelled)
        return future

    def close(self) -> None:
        """End process and thread; what still waits fails with Overloaded."""
        with self._lock:
            self._closed = True
            self._lock.notify()
            if self._process is not None:
                self._process.kill()
        if self._thread.ident is not None:
            self._thread.join()
        if self._first_process is not None:
            self._first_process.discard()
        with self._lock:
            jobs = list(self._jobs.values())
            self._jobs.clear()
        for job in jobs:
            _settle(job, Overloaded("this worker is stopping"))

    def _note_cancelled(self, future: "Future[Grammar]") -> None:
        if future.cancelled():
            with self._lock:
                self._lock.notify()

    # --- compiler thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # So that the first grammar need not wait for it. If it fails, the next job tries again.
            self._ensure_process()
            while self._wait():
                self._cancel_abandoned()
                self._hear_all()
                self._send_new()
        except BaseException as error:
            self._on_fatal(error)
        finally:
            self._drop_process()

    def _wait(self) -> bool:
        """Until there is something to do. False if that is to end."""
        with self._lock:
            while not (
                self._closed or self._heard or any(job.abandoned or not job.sent for job in self._jobs.values())
            ):
                silent = not self._lock.wait(self._silent_seconds if self._jobs else None)
                if silent and not self._heard and self._process is not None:
                    _log.error("the compile process does not answer")
                    self._process.kill()
            return not self._closed

    def _cancel_abandoned(self) -> None:
        with self._lock:
            abandoned = [job for job in self._jobs.values() if job.abandoned]
            for job in abandoned:
                del self._jobs[job.key]
        for job in abandoned:
            if job.sent and self._process is not None:
                self._process.send(Frame(Tag.CANCEL, job.number))

    def _hear_all(self) -> None:
        while self._heard:
            frame = self._heard.popleft()
            if frame is None:
                self._process_ended()
            elif frame.tag is not Tag.READY:
                self._take_answer(frame)

    def _process_ended(self) -> None:
        """Jobs that it had may be sent to another one."""
        self._drop_process()
        if self._closed:
            return
        with self._lock:
            lost = [job for job in self._jobs.values() if job.sent and job.num_sends == _MOST_SENDS]
            for job in self._jobs.values():
                job.sent = False
        if lost:
            _log.error("grammars cannot be compiled: the compile process has ended")
        for job in lost:
            self._finish(job, _unavailable())

    def _take_answer(self, frame: Frame) -> None:
        with self._lock:
            job = next((job for job in self._jobs.values() if job.number == frame.job), None)
        # It may have been cancelled meanwhile.
        if job is not None:
            self._finish(job, self._answer(frame, job.spec))

    def _answer(self, frame: Frame, spec: GrammarSpec) -> Grammar | TandemError:
        match frame.tag:
            case Tag.COMPILED:
                assert self._vocabulary is not None
                return self._vocabulary.load_grammar(spec.kind, frame.payload)
            case Tag.STARVED:
                return Overloaded(frame.payload.decode(), retry_after=_RETRY_AFTER)
            case Tag.REFUSED:
                return InvalidRequest(frame.payload.decode(), field="grammar")
        raise AssertionError(f"the compile process answered {frame.tag.name}")

    def _send_new(self) -> None:
        with self._lock:
            new = [job for job in self._jobs.values() if not job.sent]
        if not new:
            return
        process = self._ensure_process()
        for job in new:
            if process is None:
                self._finish(job, _unavailable())
            else:
                job.sent, job.num_sends = True, job.num_sends + 1
                process.send(Frame(Tag.COMPILE, job.number, encode_job(job.spec.kind, job.spec.source)))

    def _ensure_process(self) -> CompileProcess | None:
        """None if it cannot be started just now."""
        if self._process is not None:
            return self._process
        first, self._first_process = self._first_process, None
        try:
            process = CompileProcess(first or start_process(), self._on_frame)
        except OSError as error:
            _log.error("the compile process cannot be started", extra={"reason": str(error)})
            return None
        with self._lock:
            self._process = process
            if self._closed:
                process.kill()
        process.introduce(self._serialized_vocabulary, self._limits)
        return process

    def _drop_process(self) -> None:
        process = self._process
        if process is not None:
            process.close()
            with self._lock:
                self._process = None

    def _finish(self, job: _Job, answer: Grammar | TandemError) -> None:
        with self._lock:
            if isinstance(answer, Grammar):
                self._cache.put(job.key, answer)
            elif isinstance(answer, InvalidRequest):
                self._cache.put(job.key, answer.message)
            del self._jobs[job.key]
        _settle(job, answer)

    # --- reader's thread ----------------------------------------------------------------------------

    def _on_frame(self, frame: Frame | None) -> None:
        with self._lock:
            self._heard.append(frame)
            self._lock.notify()


def _unavailable() -> Overloaded:
    return Overloaded("the compiler of grammars is not available", retry_after=_RETRY_AFTER)


def _settle(job: _Job, answer: Grammar | TandemError) -> None:
    for future in job.waiting:
        if isinstance(answer, Grammar):
            _settled(future, answer)
        else:
            _failed(future, answer)


def _settled(future: "Future[Grammar]", entry: Grammar | str) -> "Future[Grammar]":
    if isinstance(entry, str):
        return _failed(future, InvalidRequest(entry, field="grammar"))
    if future.set_running_or_notify_cancel():
        future.set_result(entry)
    return future


def _failed(future: "Future[Grammar]", error: TandemError) -> "Future[Grammar]":
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
    return future
