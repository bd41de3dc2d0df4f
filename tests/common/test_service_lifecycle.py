"""A worker from ready to drained, and what ends it."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from common.config import Address
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.service.identity import WorkerIdentity
from common.service.lifecycle import Drainable, ShutdownSignal, listen, serve_until_shutdown
from common.service.options import ProcessOptions
from tests.factories.rpc import PATIENCE, eventually


def options(**changes: Any) -> ProcessOptions:
    values: dict[str, Any] = {
        "worker_id": "w",
        "host": "127.0.0.1",
        "port": 0,
        "advertise": None,
        "redis": "",
        "log_level": "info",
        "log_format": "text",
        "metrics_port": 0,
        "drain_seconds": 3600.0,
    }
    return ProcessOptions(**(values | changes))


class Process:
    """A served worker without engine; idle when `busy` says so."""

    def __init__(self, drain_seconds: float = 3600.0) -> None:
        self.shutdown = ShutdownSignal()
        self.server = RpcServer()
        self.busy = False
        self.drains = 0
        self._options = options(drain_seconds=drain_seconds)
        self.address = ""

    async def __aenter__(self) -> "Process":
        self.address = await listen(self.server, self._options, ())
        self.task = asyncio.create_task(
            serve_until_shutdown(
                identity=WorkerIdentity.new("decode", "w"),
                model="m",
                address=self.address,
                options=self._options,
                server=self.server,
                metrics=CollectorRegistry(),
                shutdown=self.shutdown,
                role=Drainable(self._begin, lambda: not self.busy),
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.server.stop(0)

    async def _begin(self) -> None:
        self.drains += 1

    async def ended(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.task

    async def health(self) -> int:
        async with open_channel(self.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            return int(answer.status)


@pytest.mark.parametrize(
    "end", [lambda p: p.shutdown.request(), lambda p: os.kill(os.getpid(), signal.SIGTERM)], ids=["request", "SIGTERM"]
)
async def test_a_drain_waits_for_what_runs(end: Callable[[Process], None]) -> None:
    async with Process() as process:
        process.shutdown.install()
        try:
            while await process.health() != health_pb2.HealthCheckResponse.SERVING:
                pass
            process.busy = True
            end(process)
            await eventually(lambda: process.drains)
            assert await process.health() == health_pb2.HealthCheckResponse.NOT_SERVING
            assert not process.task.done()
            process.busy = False
            await process.ended()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_second_request_does_not_wait() -> None:
    async with Process() as process:
        process.busy = True
        process.shutdown.request()
        await eventually(lambda: process.drains)
        process.shutdown.request()
        await process.ended()
    assert process.drains == 1


async def test_the_time_to_drain_is_limited() -> None:
    async with Process(drain_seconds=0.0) as process:
        process.busy = True
        process.shutdown.request()
        await process.ended()


async def test_a_fatal_error_from_a_thread_ends_it_at_once_and_is_raised() -> None:
    async with Process() as process:
        process.busy = True
        await asyncio.to_thread(process.shutdown.fail, AssertionError("a broken invariant"))
        await asyncio.to_thread(process.shutdown.fail, RuntimeError("its echo"))
        with pytest.raises(AssertionError, match="a broken invariant"):
            await process.ended()


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [(None, "127.0.0.1:"), (Address("pod.svc", 7), "pod.svc:7"), (Address("::1", 7), "[::1]:7")],
)
async def test_peers_are_told_the_advertised_address(advertise: Address | None, expected: str) -> None:
    server = RpcServer()
    try:
        assert (await listen(server, options(advertise=advertise), ())).startswith(expected)
    finally:
        await server.stop(0)
