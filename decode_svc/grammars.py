"""Requests that wait for their grammar: compiled beside the engine, which then takes them as if they had just come.

Until then the engine does not know them, so that cancel, time limit and loss of their stream are seen to here. Lives on
the event loop; knows neither protobuf nor streams.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from common.engine.grammar import Grammar
from common.errors import InvalidRequest, Overloaded
from common.sampling import GrammarSpec
from decode_svc.messages import AcceptedOut, Cancel, DecodeOutput, FinishedOut, RejectedOut, ShortageOut
from decode_svc.request import DecodeRequest, Outcome, Timings

Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Waiting:
    request: DecodeRequest
    #: time.monotonic() when it came.
    arrived: float
    grammar: "asyncio.Future[Grammar]"
    timer: asyncio.TimerHandle | None = None
    #: Choices that were cancelled meanwhile.
    cancelled: list[int] = field(default_factory=list)


class GrammarGate:
    """Holds requests until their grammar is there.

    Args:
        compile: see `GrammarCompiler.compile`.
        admit: takes the request, now with its grammar, to the engine.
        cancel: takes the cancel of a choice to the engine.
        deliver: takes answers to the request's gateway.
    """

    def __init__(
        self,
        *,
        compile: Callable[[GrammarSpec], "Future[Grammar]"],
        admit: Callable[[DecodeRequest], None],
        cancel: Callable[[Cancel], None],
        deliver: Callable[[Sequence[DecodeOutput]], None],
    ) -> None:
        self._compile = compile
        self._admit = admit
        self._cancel = cancel
        self._deliver = deliver
        self._waiting: dict[Key, _Waiting] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, request: DecodeRequest) -> None:
        """Answer it, or hand it to the engine, once its grammar is compiled; never before this returns."""
        assert request.params.grammar is not None, "a request without a grammar has nothing to wait for"
        if request.key in self._waiting:
            words = "this attempt is running already"
            self._deliver([RejectedOut(request.stream, *request.key, "request_id", words)])
            return
        grammar = asyncio.wrap_future(self._compile(request.params.grammar))
        waiting = _Waiting(request, time.monotonic(), grammar)
        self._waiting[request.key] = waiting
        grammar.add_done_callback(lambda _: self._compiled(waiting))
        if request.timeout is not None:
            waiting.timer = asyncio.get_running_loop().call_later(request.timeout, self._expire, waiting)

    def cancel(self, cancel: Cancel) -> bool:
        """End a request that waits, or remember that one of its choices is not wanted. False: no such request here."""
        waiting = self._waiting.get((cancel.request_id, cancel.attempt))
        if waiting is None:
            return False
        if cancel.choice is not None:
            waiting.cancelled.append(cancel.choice)
        else:
            self._end(waiting, Outcome.CANCELLED, "")
        return True

    def drop_stream(self, stream: str) -> None:
        """The stream is gone: forget its requests without an answer."""
        for waiting in [waiting for waiting in self._waiting.values() if waiting.request.stream == stream]:
            self._remove(waiting)

    def _compiled(self, waiting: _Waiting) -> None:
        error = None if waiting.grammar.cancelled() else waiting.grammar.exception()
        if self._waiting.get(waiting.request.key) is not waiting:
            return
        self._remove(waiting)
        request = waiting.request
        match error:
            case None:
                self._hand_on(waiting, waiting.grammar.result())
            case InvalidRequest():
                self._deliver([RejectedOut(request.stream, *request.key, error.field or "grammar", error.message)])
            case Overloaded():
                seconds = error.retry_after or 1.0
                self._deliver([ShortageOut(request.stream, *request.key, error.message, seconds)])
            case _:
                raise error

    def _hand_on(self, waiting: _Waiting, grammar: Grammar) -> None:
        request = waiting.request
        left = request.timeout and max(0.0, request.timeout - (time.monotonic() - waiting.arrived))
        self._admit(replace(request, grammar=grammar, timeout=left))
        for choice in waiting.cancelled:
            self._cancel(Cancel(*request.key, choice))

    def _expire(self, waiting: _Waiting) -> None:
        self._end(waiting, Outcome.DEADLINE, f"not finished within {waiting.request.timeout:.3f} s")

    def _end(self, waiting: _Waiting, outcome: Outcome, message: str) -> None:
        """Answer as the engine would: it was taken over, and has ended."""
        self._remove(waiting)
        request = waiting.request
        finished = FinishedOut(
            request.stream,
            *request.key,
            outcome,
            message,
            Timings(waiting.arrived),
            prompt_tokens=len(request.prompt_ids),
            output_tokens=sum(len(choice.output_ids) for choice in request.choices),
            total_seconds=time.monotonic() - waiting.arrived,
            traceparent=request.traceparent,
        )
        self._deliver([AcceptedOut(request.stream, *request.key), finished])

    def _remove(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.request.key]
        if waiting.timer is not None:
            waiting.timer.cancel()
        # If it is not there yet; nobody else may want it.
        waiting.grammar.cancel()
