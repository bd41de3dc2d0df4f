"""From a grammar's source to a grammar, without waiting for it and whatever the source is.

One thread takes jobs, asks the compile process, and keeps what came of them. Knows nothing of requests.
"""

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from common.engine.grammar.cache import GrammarCache, digest
from common.engine.grammar.child import CompileProcess, ProcessLost
from common.engine.grammar.compile_process import encode_job
from common.engine.grammar.frames import Tag
from common.engine.grammar.grammar import Grammar
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest, Overloaded, TandemError
from common.sampling import GrammarSpec

_log = logging.getLogger(__name__)

#: Seconds after which a full queue, or a compiler that had to be started again, may have room.
_RETRY_AFTER = 2.0
_NO_VOCABULARY = "this worker's model takes no grammars: it has no tokenizer, or no end token"


class _Job:
    """A source, and all that wait for it."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.waiting: list[Future[Grammar]] = []


class GrammarCompiler:
    """Compiles one grammar at a time, each under limits of its own, in a process that can be lost.

    Answers are kept, refusals too: a source that is sent again is answered at once. Those who ask for the same source
    at the same time wait for one job. All methods may be called from any thread.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        *,
        on_fatal: Callable[[BaseException], None],
        limits: CompileLimits | None = None,
        max_waiting: int = 64,
        cache_bytes: int = 256 << 20,
    ) -> None:
        """
        Args:
            vocabulary: None if the model has none that grammars could be about; each is refused then.
            on_fatal: called on the compiler's thread with the bug that ends it.
            max_waiting: jobs beside the one that is under way.
            cache_bytes: memory for answers.
        """
        self._vocabulary = vocabulary
        self._on_fatal = on_fatal
        self._max_waiting = max_waiting
        self._process = (
            None if vocabulary is None else CompileProcess(vocabulary.serialize(), limits or CompileLimits())
        )
        #: Guards all below.
        self._lock = threading.Condition()
        self._cache = GrammarCache(cache_bytes)
        #: By digest, oldest first; the first one may be under way.
        self._jobs: OrderedDict[bytes, _Job] = OrderedDict()
        self._running: bytes | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the compile process, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start thread and process, once; does not wait for them. Jobs may be handed in before."""
        if self._process is not None:
            self._thread.start()

    def compile(self, spec: GrammarSpec) -> "Future[Grammar]":
        """The grammar of a source.

        The future fails with InvalidRequest, naming `grammar`, if the source is wrong or too complex; with Overloaded
        if too many are waiting, or the compiler cannot run just now. It may be cancelled: a source that nobody waits
        for any more is not compiled.
        """
        future: Future[Grammar] = Future()
        if self._process is None:
            return _failed(future, InvalidRequest(_NO_VOCABULARY, field="grammar"))
        key = digest(spec.kind.value.encode(), spec.source.encode(errors="surrogatepass"))
        with self._lock:
            if self._closed:
                return _failed(future, Overloaded("this worker is stopping"))
            if (entry := self._cache.get(key)) is not None:
                return _settled(future, entry)
            job = self._jobs.get(key)
            if job is None:
                self._forget_abandoned()
                if len(self._jobs) - (self._running is not None) >= self._max_waiting:
                    return _failed(future, Overloaded("too many grammars are waiting", retry_after=_RETRY_AFTER))
                job = self._jobs[key] = _Job(spec)
            job.waiting.append(future)
            self._lock.notify()
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
        with self._lock:
            jobs = list(self._jobs.values())
            self._jobs.clear()
        for job in jobs:
            _settle(job, Overloaded("this worker is stopping"))

    # --- compiler thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._process is not None
        try:
            self._serve(self._process)
        except BaseException as error:
            self._on_fatal(error)
        finally:
            self._process.close()

    def _serve(self, process: CompileProcess) -> None:
        # So that the first grammar need not wait for it. If it fails, the next job tries again.
        with contextlib.suppress(ProcessLost):
            process.ensure_started()
        while (taken := self._next()) is not None:
            key, job = taken
            self._finish(key, job, self._answer(process, job.spec))

    def _next(self) -> tuple[bytes, _Job] | None:
        with self._lock:
            while not self._closed:
                self._forget_abandoned()
                if self._jobs:
                    self._running = next(iter(self._jobs))
                    return self._running, self._jobs[self._running]
                self._lock.wait()
            return None

    def _forget_abandoned(self) -> None:
        for key, job in list(self._jobs.items()):
            if key != self._running and all(future.cancelled() for future in job.waiting):
                del self._jobs[key]

    def _answer(self, process: CompileProcess, spec: GrammarSpec) -> Grammar | TandemError:
        try:
            tag, payload = self._ask(process, encode_job(spec.kind, spec.source))
        except ProcessLost as error:
            if not self._closed:
                _log.error("grammars cannot be compiled", extra={"reason": str(error)})
            return Overloaded("the compiler of grammars is not available", retry_after=_RETRY_AFTER)
        match tag:
            case Tag.COMPILED:
                assert self._vocabulary is not None
                return self._vocabulary.load_grammar(spec.kind, payload)
            case Tag.STARVED:
                return Overloaded(payload.decode(), retry_after=_RETRY_AFTER)
            case Tag.REFUSED:
                return InvalidRequest(payload.decode(), field="grammar")
        raise AssertionError(f"the compile process answered {tag.name}")

    @staticmethod
    def _ask(process: CompileProcess, job: bytes) -> tuple[Tag, bytes]:
        """Twice if need be: a process may have been lost while it had nothing to do."""
        try:
            process.ensure_started()
            return process.ask(job)
        except ProcessLost:
            process.ensure_started()
            return process.ask(job)

    def _finish(self, key: bytes, job: _Job, answer: Grammar | TandemError) -> None:
        with self._lock:
            if isinstance(answer, Grammar):
                self._cache.put(key, answer)
            elif isinstance(answer, InvalidRequest):
                self._cache.put(key, answer.message)
            del self._jobs[key]
            self._running = None
        _settle(job, answer)


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
