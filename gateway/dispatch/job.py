"""One request from its grant to its end, over as many attempts as it takes.

The ladder: queue (dispatcher), route (placement), first token, decode; the same names are spans. The grant is given
back at the first token or at the end, whichever comes first, on every path.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from opentelemetry.trace import Span, Tracer, get_current_span, set_span_in_context

from common.errors import DeadlineExceeded, InvalidRequest, NoWorker, TandemError
from common.hashing import BlockHash
from common.pb.tandem.v1 import decode_pb2 as pb
from common.pb.tandem.v1.generation_pb2 import RequestStats
from common.rpc.convert import sampling_to_proto
from common.telemetry.tracing import traceparent_of
from gateway.dispatch.connection import Attempt, Broken, DecodeConnection
from gateway.dispatch.output import Output
from gateway.dispatch.placement import Placed, Placement, Unwanted
from gateway.generation import GenerationRequest, GenerationStats
from gateway.queue.interface import Grant
from gateway.tasks import spawn

_log = logging.getLogger(__name__)


class Job:
    """Drives one request; `output` is what its client reads."""

    def __init__(
        self,
        request: GenerationRequest,
        hashes: Sequence[BlockHash],
        grant: Grant,
        placement: Placement,
        tracer: Tracer,
        *,
        deadline: float | None,
        max_attempts: int,
        on_end: Callable[["Job"], None],
    ) -> None:
        """`deadline`: event-loop time by which it must be over. `on_end` is called once, however it ends."""
        self.request = request
        self.hashes = hashes
        self.output = Output(
            request.num_choices,
            num_prompt_logprobs=0 if request.params.prompt_logprobs is None else len(request.prompt_ids) - 1,
            on_cancel_choice=self._cancel_choice,
            on_close=self._close,
        )
        self.avoided: set[str] = set()
        #: The accepted attempt; the last one, once it is over.
        self.placed: Placed | None = None
        self._grant = grant
        self._placement = placement
        self._deadline = deadline
        self._max_attempts = max_attempts
        self._on_end = on_end
        self._over = False
        self._failures = 0
        self._attempts = 0
        #: Prompt tokens that some attempt has had computed, by what its deltas said.
        self._computed_tokens = 0
        self._current: tuple[DecodeConnection, Attempt] | None = None
        self._task: asyncio.Task[None] | None = None
        self._parent = get_current_span()
        self._spans = _FirstTokenAndDecode(tracer, self._parent)

    async def start(self) -> None:
        """Place the first attempt, then follow it in the background. Raises as Placement.place; ends itself then."""
        try:
            self.placed = await self._placement.place(self)
        except BaseException:
            self._clean_up()
            raise
        self._task = spawn(self._follow(), f"request {self.request.request_id}")

    # --- for placement (Placeable) --------------------------------------------------------------------

    @property
    def is_replay(self) -> bool:
        return self.placed is not None

    def begin_attempt(self, connection: DecodeConnection) -> tuple[Attempt, pb.SubmitRequest]:
        number, params = self._attempts, self.request.params
        attempt = Attempt(self.request.request_id, number, self._on_delta, self.output.put_prompt_logprobs)
        if self.output.has_prompt_logprobs:
            # A replay would compute the whole prompt for them once more, whatever is cached.
            params = replace(params, prompt_logprobs=None)
        self._attempts += 1
        self._spans.submitted()
        self._current = (connection, attempt)
        return attempt, pb.SubmitRequest(
            request_id=attempt.request_id,
            attempt=attempt.number,
            prompt_ids=self.request.prompt_ids,
            choices=self.output.prefixes,
            sampling=sampling_to_proto(params),
            cache_salt=self.request.cache_salt,
            traceparent=traceparent_of(self._parent),
            timeout_seconds=self._seconds_left(),
        )

    def attempt_not_taken(self) -> None:
        # From here on a cancelled choice is our own business, and not that of a worker which has none of the request.
        self._current = None

    @property
    def is_unwanted(self) -> bool:
        return self.output.all_ended

    def failed(self, worker: str, reason: str) -> None:
        self._failures += 1
        self.avoided.add(worker)
        _log.warning(
            "attempt failed",
            extra={"request_id": self.request.request_id, "failures": self._failures, "reason": reason},
        )
        if self._failures >= self._max_attempts:
            raise NoWorker(f"gave up after {self._failures} attempts: {reason}")

    def _seconds_left(self) -> float:
        if self._deadline is None:
            return 0.0
        # 0 would mean no limit.
        return max(0.001, self._deadline - asyncio.get_running_loop().time())

    # --- following ------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                stats = await self._run_to_end()
        except TimeoutError:
            self.output.fail(DeadlineExceeded(f"not finished within {self.request.timeout} s"))
        except TandemError as error:
            self.output.fail(error)
        except Exception:
            self.output.fail(TandemError("internal error"))
            raise
        else:
            self.output.finish(stats)
        finally:
            self._clean_up()

    async def _run_to_end(self) -> GenerationStats:
        while True:
            assert self.placed is not None, "nothing to follow"
            ended = await self.placed.attempt.ended
            if self.output.all_ended:
                return self._stats(ended.stats if isinstance(ended, pb.Finished) else None)
            self.failed(self.placed.connection.incarnation, _reason(ended))
            self._leave_attempt()
            try:
                self.placed = await self._placement.place(self)
            except Unwanted:
                return self._stats(None)

    def _on_delta(self, delta: pb.Delta) -> bool:
        """Only the current attempt gets here: connections drop what belongs to others."""
        self._computed_tokens = max(self._computed_tokens, delta.computed_tokens)
        self._grant.release()
        if self.placed is not None:
            self.placed.load.prefilled()
        self._spans.token()
        return self.output.put(delta)

    def _cancel_choice(self, choice: int) -> None:
        if self._current is not None:
            connection, attempt = self._current
            connection.cancel(attempt, choice)
        elif self.output.all_ended and self._task is not None:
            # Between two attempts, and nothing is left to wait for.
            self.output.finish(self._stats(None))
            self._close()

    def _close(self) -> None:
        """The reader has gone."""
        if self._task is not None:
            self._task.cancel()
        # Not left to the task: one that has not begun to run never will, and its `finally` with it.
        self._clean_up()

    def abort(self, error: TandemError) -> None:
        """The gateway stops: tell the reader, free everything."""
        self.output.fail(error)
        self._close()

    def _leave_attempt(self) -> None:
        if self._current is not None:
            connection, attempt = self._current
            connection.cancel(attempt)
            self._current = None
        if self.placed is not None:
            self.placed.load.end()

    def _clean_up(self) -> None:
        """Free everything, everywhere. Idempotent."""
        self._leave_attempt()
        if self._over:
            return
        self._over = True
        self._grant.release()
        self._spans.end()
        self._on_end(self)

    def _stats(self, stats: RequestStats | None) -> GenerationStats:
        """`stats` is None if the worker was lost after the last token: then its figures are lost too.

        They are those of the attempt that brought the end; see GenerationStats for what this means after a replay.
        """
        prompt = len(self.request.prompt_ids)
        found = RequestStats(prompt_tokens=prompt) if stats is None else stats
        # Attempts compute ends of the same prompt: the longest one holds the others.
        computed = max(found.computed_tokens, self._computed_tokens) or prompt
        details = {field.name: getattr(found, field.name) for field in RequestStats.DESCRIPTOR.fields}
        return GenerationStats(
            prompt_tokens=prompt,
            output_tokens=self.output.output_tokens,
            cached_tokens=max(0, prompt - computed),
            details=details | {"computed_tokens": computed},
        )


def _reason(ended: pb.Finished | Broken) -> str:
    """Why the attempt did not bring the request to its end. Raises if trying again makes no sense."""
    if isinstance(ended, Broken):
        return ended.reason
    if ended.outcome == pb.OUTCOME_DEADLINE:
        raise DeadlineExceeded(ended.message or "the request's time limit ran out")
    if ended.outcome == pb.OUTCOME_TOO_COMPLEX:
        raise InvalidRequest(ended.message, field="grammar")
    return ended.message or f"the worker ended it with {pb.Outcome.Name(ended.outcome)}"


class _FirstTokenAndDecode:
    """The two spans from the first Submit to the end."""

    def __init__(self, tracer: Tracer, parent: Span) -> None:
        self._tracer = tracer
        self._context = set_span_in_context(parent)
        self._open: Span | None = None
        self._has_token = False

    def submitted(self) -> None:
        if self._open is None and not self._has_token:
            self._open = self._tracer.start_span("first token", context=self._context)

    def token(self) -> None:
        if not self._has_token:
            self._has_token = True
            self.end()
            self._open = self._tracer.start_span("decode", context=self._context, start_time=time.time_ns())

    def end(self) -> None:
        if self._open is not None:
            self._open.end()
            self._open = None
