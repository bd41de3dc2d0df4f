"""Builds a dispatcher over fake workers, for tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from opentelemetry.trace import NoOpTracer, Tracer

from common.sampling import SamplingParams
from gateway.cluster.membership import Cluster
from gateway.cluster.views import Expectation
from gateway.dispatch.connection import DecodeConnections
from gateway.dispatch.dispatcher import ClusterDispatcher
from gateway.dispatch.loads import Loads
from gateway.dispatch.placement import Placement
from gateway.generation import Generation, GenerationRequest, ServingLimits, TokenDelta
from gateway.planner.traffic import TrafficWindow
from gateway.prefixes import PrefixIndex
from gateway.queue.admission import GatewayQueue
from gateway.router import Router
from tests.gateway.fake_workers import MODEL, FakeWorker

TIMEOUT = 20.0


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; fails after TIMEOUT."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():  # noqa: ASYNC110  # any state, not only what has an event
            await asyncio.sleep(0.005)


def request(
    request_id: str = "r1",
    *,
    prompt: Sequence[int] = range(10),
    max_tokens: int = 4,
    n: int = 1,
    timeout: float | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=7, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return GenerationRequest(request_id, tuple(prompt), params, num_choices=n, timeout=timeout)


async def collect(generation: Generation) -> list[TokenDelta]:
    async with asyncio.timeout(TIMEOUT):
        return [delta async for delta in generation]


def tokens_of(deltas: Sequence[TokenDelta], choice: int = 0) -> list[int]:
    """The choice's tokens, after checking that indices are contiguous."""
    tokens: list[int] = []
    for delta in deltas:
        if delta.choice == choice:
            assert delta.first_index == len(tokens), f"gap or repeat at {delta.first_index}, have {len(tokens)}"
            tokens += delta.token_ids
    return tokens


@dataclass
class Rig:
    """All parts of a running dispatcher."""

    workers: list[FakeWorker]
    cluster: Cluster
    queue: GatewayQueue
    loads: Loads
    traffic: TrafficWindow
    prefixes: PrefixIndex
    dispatcher: ClusterDispatcher

    async def all_live(self) -> None:
        await eventually(lambda: sum(view.routable for view in self.cluster.workers()) == len(self.workers))

    def assert_clean(self) -> None:
        """Nothing is held for anyone."""
        assert self.dispatcher.running == 0
        assert not +self.loads.tokens
        assert not +self.loads.requests

    async def grants_returned(self) -> None:
        self.queue.poke()
        await eventually(lambda: self.queue.figures.granted == 0 and self.queue.figures.waiting == 0)


@asynccontextmanager
async def rig(
    *workers: FakeWorker,
    tracer: Tracer | None = None,
    patience: float = 5.0,
    max_attempts: int = 3,
    max_waiting: int = 100,
    capacity: int = 100_000,
    local_prefill_tokens: int = 0,
) -> AsyncIterator[Rig]:
    """Start the workers and a dispatcher that is connected to all of them."""
    for worker in workers:
        await worker.start()
    tracer = tracer or NoOpTracer()
    cluster = Cluster(Expectation(MODEL), peers=[(worker.role, worker.address) for worker in workers])
    queue = GatewayQueue(None, MODEL, "gw", capacity=lambda: capacity, speed=lambda: 100.0, max_waiting=max_waiting)
    connections, prefixes, loads, traffic = DecodeConnections("gw"), PrefixIndex(), Loads(), TrafficWindow()
    router = Router(local_prefill_tokens=local_prefill_tokens)
    placement = Placement(cluster, connections, router, prefixes, loads, tracer, patience=patience)
    dispatcher = ClusterDispatcher(
        cluster,
        queue,
        placement,
        prefixes,
        traffic,
        tracer,
        model_limits=ServingLimits(8192, 5000),
        max_attempts=max_attempts,
    )
    await queue.start()
    await cluster.start()
    parts = Rig(list(workers), cluster, queue, loads, traffic, prefixes, dispatcher)
    try:
        await parts.all_live()
        yield parts
    finally:
        dispatcher.abort()
        await queue.close()
        await connections.close()
        await cluster.close()
        for worker in workers:
            await worker.stop()
