"""Admission, routing and retries behind one call: the Dispatcher that the edges use."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from opentelemetry.trace import Tracer

from common.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, NoWorker, Overloaded
from common.hashing import BlockHash
from gateway.cluster.membership import Cluster
from gateway.dispatch.job import Job
from gateway.dispatch.placement import Placement
from gateway.generation import Generation, GenerationRequest, GenerationStats, ServingLimits
from gateway.prefixes import PrefixIndex, routing_hashes
from gateway.queue.interface import AdmissionQueue, Grant

_log = logging.getLogger(__name__)

_RETRY_AFTER = 1.0


class TrafficObserver(Protocol):
    """Who wants to know what is going on: sizing, metrics, status."""

    def arrived(self, prompt_tokens: int, uncached_tokens: int) -> None:
        """A request came; `uncached_tokens` is the estimate it was queued with."""
        ...

    def finished(self, stats: GenerationStats) -> None:
        """A request ended well."""
        ...


class ClusterDispatcher:
    """Implements gateway.generation.Dispatcher."""

    def __init__(
        self,
        cluster: Cluster,
        queue: AdmissionQueue,
        placement: Placement,
        prefixes: PrefixIndex,
        observer: TrafficObserver,
        tracer: Tracer,
        *,
        model_limits: ServingLimits,
        max_attempts: int = 3,
    ) -> None:
        """`model_limits`: what holds until a decode worker has told its own."""
        self._cluster = cluster
        self._queue = queue
        self._placement = placement
        self._prefixes = prefixes
        self._observer = observer
        self._tracer = tracer
        self._model_limits = model_limits
        self._max_attempts = max_attempts
        self._jobs: dict[str, Job] = {}
        self._submitting: set[str] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def limits(self) -> ServingLimits:
        ready = self._cluster.routable("decode")
        longest = [view.status.max_request_tokens for view in ready if view.status is not None]
        vocabularies = [view.manifest.vocab_size for view in ready if view.manifest is not None]
        return ServingLimits(
            max(longest, default=self._model_limits.max_request_tokens),
            min(vocabularies, default=self._model_limits.vocab_size),
        )

    async def submit(self, request: GenerationRequest) -> Generation:
        self._check(request)
        self._begin(request.request_id)
        deadline = None if request.timeout is None else asyncio.get_running_loop().time() + request.timeout
        try:
            async with asyncio.timeout_at(deadline):
                return await self._admit_and_start(request, deadline)
        except TimeoutError:
            raise DeadlineExceeded(f"not started within {request.timeout} s") from None
        finally:
            self._submitting.discard(request.request_id)
            self._note_idle()

    def _check(self, request: GenerationRequest) -> None:
        if self._draining:
            raise Overloaded("the gateway is shutting down", retry_after=_RETRY_AFTER)
        if request.request_id in self._jobs or request.request_id in self._submitting:
            raise InvalidRequest(f"request {request.request_id} is running already", field="request_id")
        if not self._cluster.routable("decode"):
            raise NoWorker("no decode worker is ready", retry_after=_RETRY_AFTER)
        wanted = len(request.prompt_ids) + request.params.max_tokens
        longest = self.limits().max_request_tokens
        if wanted > longest:
            raise ContextTooLong(
                f"{len(request.prompt_ids)} prompt and {request.params.max_tokens} output tokens exceed the "
                f"{longest} that a worker can hold",
                field="max_tokens",
            )

    async def _admit_and_start(self, request: GenerationRequest, deadline: float | None) -> Generation:
        hashes = routing_hashes(request.prompt_ids, request.cache_salt)
        uncached = self._uncached(request, hashes)
        self._observer.arrived(len(request.prompt_ids), uncached)
        grant = await self._admit(request, uncached)
        job = Job(
            request,
            hashes,
            grant,
            self._placement,
            self._tracer,
            deadline=deadline,
            max_attempts=self._max_attempts,
            on_end=self._ended,
        )
        self._jobs[request.request_id] = job
        await job.start()
        return job.output

    async def _admit(self, request: GenerationRequest, cost: int) -> Grant:
        with self._tracer.start_as_current_span("queue"):
            return await self._queue.acquire(
                request.request_id, request.tenant, request.request_class, cost, priority=request.priority
            )

    def _uncached(self, request: GenerationRequest, hashes: Sequence[BlockHash]) -> int:
        """Prompt tokens that will have to be computed where most of the prefix is held."""
        if request.params.prompt_logprobs is not None:
            return len(request.prompt_ids)
        workers = self._cluster.routable("decode") + self._cluster.routable("prefill")
        overlaps = [self._prefixes.overlap(view.worker_id, view.incarnation, hashes) for view in workers]
        return max(1, len(request.prompt_ids) - max(overlaps, default=0))

    def _ended(self, job: Job) -> None:
        self._jobs.pop(job.request.request_id, None)
        if (stats := job.output.stats) is not None:
            self._observer.finished(stats)
            self._record_answer(job)
        self._note_idle()

    def _record_answer(self, job: Job) -> None:
        """The next turn of a conversation finds prompt and answer on the decode worker."""
        if job.placed is None:
            return
        connection = job.placed.connection
        tokens = [*job.request.prompt_ids, *job.output.output_ids[0]]
        hashes = routing_hashes(tokens, job.request.cache_salt)
        self._prefixes.record(connection.worker_id, connection.incarnation, hashes)

    # --- shutting down --------------------------------------------------------------------------------

    def _begin(self, request_id: str) -> None:
        self._submitting.add(request_id)
        self._idle.clear()

    def _note_idle(self) -> None:
        if not self._jobs and not self._submitting:
            self._idle.set()

    @property
    def running(self) -> int:
        """Requests that are queued or being answered."""
        return len(self._jobs.keys() | self._submitting)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()

    def abort(self) -> None:
        """End what still runs with an error."""
        for job in list(self._jobs.values()):
            job.abort(Overloaded("the gateway is shutting down", retry_after=_RETRY_AFTER))
