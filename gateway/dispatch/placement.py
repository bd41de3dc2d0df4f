"""Routes a request and submits it, worker after worker, until one accepts.

A worker that is short is passed over; one that cannot be reached or breaks is passed over too, and if nobody is left,
a while is spent waiting for a worker to come (back).
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.trace import Tracer

from common.errors import InvalidRequest, NoWorker, Overloaded
from common.hashing import BlockHash
from common.pb.tandem.v1 import decode_pb2 as pb
from gateway.cluster.membership import Cluster
from gateway.cluster.views import WorkerView
from gateway.dispatch.connection import Answer, Attempt, Broken, DecodeConnection, DecodeConnections, Unreachable
from gateway.dispatch.loads import Load, Loads, kv_bytes_per_token
from gateway.generation import GenerationRequest
from gateway.prefixes import PrefixIndex
from gateway.router import Route, RouteQuery, Router, WorkerLoad

_log = logging.getLogger(__name__)

#: A worker answers between two engine steps; one that takes so long hangs.
ANSWER_SECONDS = 30.0
_RETRY_AFTER = 1.0


class Unwanted(Exception):
    """Nobody waits for tokens of the request any more. Stays inside the dispatcher."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An accepted attempt and where it runs."""

    attempt: Attempt
    connection: DecodeConnection
    load: Load
    route: Route


class Placeable(Protocol):
    """What placement needs of a job."""

    request: GenerationRequest
    #: Routing hashes of the prompt.
    hashes: Sequence[BlockHash]

    def begin_attempt(self, connection: DecodeConnection) -> tuple[Attempt, pb.SubmitRequest]:
        """A new attempt on that connection, and the message for it without prefill candidates."""
        ...

    def attempt_not_taken(self) -> None:
        """The attempt begun last was not accepted: it is nobody's any more."""
        ...

    @property
    def is_unwanted(self) -> bool:
        """All choices have ended or were cancelled: a Submit would ask for nothing."""
        ...

    def failed(self, worker: str, reason: str) -> None:
        """An attempt broke on a worker. Raises NoWorker if it was one too many."""
        ...

    @property
    def avoided(self) -> set[str]:
        """Incarnations on which it failed; to be tried last."""
        ...

    @property
    def is_replay(self) -> bool:
        """The client has been answered: waiting is better than refusing."""
        ...


class Placement:
    """Stateless but for what it is made of."""

    def __init__(
        self,
        cluster: Cluster,
        connections: DecodeConnections,
        router: Router,
        prefixes: PrefixIndex,
        loads: Loads,
        tracer: Tracer,
        *,
        patience: float,
    ) -> None:
        """`patience`: seconds to wait for a worker when none can be reached."""
        self._cluster = cluster
        self._connections = connections
        self._router = router
        self._prefixes = prefixes
        self._loads = loads
        self._tracer = tracer
        self._patience = patience

    async def place(self, job: Placeable) -> Placed:
        """Submit until accepted.

        Raises InvalidRequest (rejected), Overloaded (all short), NoWorker (nobody reachable for too long, or too many
        attempts broke), Unwanted (all choices were cancelled meanwhile).
        """
        give_up = asyncio.get_running_loop().time() + self._patience
        while True:
            shortage: pb.Shortage | None = None
            for route in self._rank(job):
                outcome = await self._try(job, route)
                if isinstance(outcome, Placed):
                    return outcome
                shortage = outcome or shortage
            if shortage is not None and not job.is_replay:
                raise _overloaded(shortage)
            try:
                async with asyncio.timeout_at(give_up):
                    await self._cluster.changed()
            except TimeoutError:
                raise _overloaded(shortage) if shortage is not None else _no_worker() from None

    def _rank(self, job: Placeable) -> Sequence[Route]:
        with self._tracer.start_as_current_span("route") as span:
            decode, prefill = self._cluster.routable("decode"), self._cluster.routable("prefill")
            kv_bytes = kv_bytes_per_token(decode[0].manifest) if decode and decode[0].manifest is not None else 0
            params = job.request.params
            query = RouteQuery(len(job.request.prompt_ids), params.max_tokens, job.request.num_choices, kv_bytes)
            routes = self._router.rank(query, self._loads_of(decode, job), self._loads_of(prefill, job))
            if routes:
                span.set_attribute("tandem.decode_worker", routes[0].worker_id)
                span.set_attribute("tandem.prefill_workers", [c.worker_id for c in routes[0].candidates])
        avoided = {view.worker_id for view in decode if view.incarnation in job.avoided}
        return sorted(routes, key=lambda route: route.worker_id in avoided)

    def _loads_of(self, views: Sequence[WorkerView], job: Placeable) -> list[WorkerLoad]:
        # A prompt whose tokens are scored is computed whole, whoever holds what of it.
        hashes = job.hashes if job.request.params.prompt_logprobs is None else ()
        return [
            self._loads.worker_load(view, self._prefixes.overlap(view.worker_id, view.incarnation, hashes))
            for view in views
        ]

    async def _try(self, job: Placeable, route: Route) -> Placed | pb.Shortage | None:
        """One worker: accepted, short, or (None) not to be had."""
        try:
            connection = await self._connections.get(route.address)
        except Unreachable as error:
            _log.info("decode worker not reachable", extra={"error": str(error)})
            return None
        if job.is_unwanted:
            raise Unwanted
        attempt, message = job.begin_attempt(connection)
        message.prefill_candidates.extend(route.candidates)
        prefill = route.candidates[0].worker_id if route.candidates else route.worker_id
        load = self._loads.add(decode=route.worker_id, prefill=prefill, tokens=route.uncached_tokens)
        with contextlib.ExitStack() as undo:
            undo.callback(job.attempt_not_taken)
            undo.callback(load.end)
            undo.callback(connection.cancel, attempt)
            connection.submit(attempt, message)
            answer = await self._answer(attempt)
            if isinstance(answer, pb.Accepted):
                undo.pop_all()
                self._record(job, route, connection)
                return Placed(attempt, connection, load, route)
        return self._not_accepted(job, connection, answer)

    async def _answer(self, attempt: Attempt) -> Answer | Broken:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.shield(attempt.answer)
        except TimeoutError:
            return Broken(f"no answer within {ANSWER_SECONDS:.0f} s")

    def _not_accepted(
        self, job: Placeable, connection: DecodeConnection, answer: Answer | Broken
    ) -> pb.Shortage | None:
        if isinstance(answer, pb.Rejected):
            raise InvalidRequest(answer.message, field=answer.field or None)
        if isinstance(answer, pb.Shortage):
            return answer
        assert isinstance(answer, Broken), f"an accepted attempt came here: {answer}"
        job.failed(connection.incarnation, answer.reason)
        return None

    def _record(self, job: Placeable, route: Route, connection: DecodeConnection) -> None:
        """Both will hold the prompt's KV."""
        self._prefixes.record(connection.worker_id, connection.incarnation, job.hashes)
        if route.candidates:
            first = route.candidates[0].worker_id
            for view in self._cluster.routable("prefill"):
                if view.worker_id == first:
                    self._prefixes.record(first, view.incarnation, job.hashes)


def _overloaded(shortage: pb.Shortage) -> Overloaded:
    message = shortage.message or "every decode worker is full"
    return Overloaded(message, retry_after=shortage.retry_after_seconds or _RETRY_AFTER)


def _no_worker() -> NoWorker:
    return NoWorker("no decode worker can be reached", retry_after=_RETRY_AFTER)
