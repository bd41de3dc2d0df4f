"""Runs the HTTP and gRPC edges for real, on free ports, over a given dispatcher."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from common.pb.tandem.v1 import inference_pb2_grpc
from common.rpc.server import RpcServer
from gateway.accounting import EdgeMetrics
from gateway.generation import Dispatcher
from gateway.http.app import HttpServices, create_app
from gateway.http.listen import bind
from gateway.http.responses.store import ResponseStore
from gateway.http.services import HttpOptions
from gateway.http.wire import JsonH11Protocol
from gateway.rpc import InferenceServicer
from gateway.rpc.auth import KeyInterceptor
from gateway.serving import ServingModel
from gateway.tenants import ApiKeys
from tests.common.text.model_folders import byte_level_folder


def tiny_model(folder: Path, **config: Any) -> ServingModel:
    """A served model made of a tiny tokenizer folder; `config` goes to `byte_level_folder`."""
    return ServingModel.load(byte_level_folder(folder, **config), "tiny")


@dataclass(slots=True)
class Edge:
    """A running HTTP edge."""

    url: str
    metrics: EdgeMetrics
    readiness: tuple[bool, str] = (True, "")
    server: uvicorn.Server | None = None
    host: str = "127.0.0.1"
    port: int = field(default=0)

    @property
    def writing_blocked(self) -> bool:
        """Some connection's buffers are full: whoever writes to it waits until the client reads."""
        assert self.server is not None, "not started"
        return any(connection.flow.write_paused for connection in self.server.server_state.connections)

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


class PromptServer(uvicorn.Server):
    """Stops when it is told to and nobody is connected; uvicorn's own looks for both ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110  # another task ends them
                    await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)


@asynccontextmanager
async def running_http(
    model: ServingModel,
    dispatcher: Dispatcher,
    *,
    options: HttpOptions | None = None,
    tracer: Tracer | None = None,
    send_buffer: int | None = None,
    keys: ApiKeys | None = None,
    responses: ResponseStore | None = None,
) -> AsyncIterator[Edge]:
    """uvicorn in this event loop; stops when the block is left. `send_buffer`: bytes that a socket holds."""
    listener = bind("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    edge = Edge(f"http://127.0.0.1:{port}", EdgeMetrics(CollectorRegistry()), port=port)
    services = HttpServices(model, dispatcher, edge.metrics, lambda: edge.readiness, options or HttpOptions())
    if tracer is not None:
        services = replace(services, tracer=tracer)
    if keys is not None:
        services = replace(services, keys=keys)
    if responses is not None:
        services = replace(services, responses=responses)
    config = uvicorn.Config(
        create_app(services),
        http=JsonH11Protocol,
        log_level="critical",
        lifespan="off",
        timeout_graceful_shutdown=1,
        # On a machine so busy that this loop stands still for seconds, no client's connection is taken for an idle one.
        timeout_keep_alive=60,
    )
    server = edge.server = PromptServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            assert not serving.done(), serving
            await asyncio.sleep(0.01)
        yield edge
    finally:
        server.stop()
        await serving
        listener.close()


@asynccontextmanager
async def running_grpc(
    model: ServingModel, dispatcher: Dispatcher, *, tracer: Tracer | None = None, keys: ApiKeys | None = None
) -> AsyncIterator[tuple[str, EdgeMetrics]]:
    """The production gRPC server with the servicer; yields its address."""
    metrics = EdgeMetrics(CollectorRegistry())
    server = RpcServer(interceptors=[KeyInterceptor(keys)] if keys is not None else [])
    servicer = InferenceServicer(model, dispatcher, metrics, tracer, keys)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc)
    port = await server.start("127.0.0.1", 0, ["tandem.v1.Inference"])
    try:
        yield f"127.0.0.1:{port}", metrics
    finally:
        await server.stop(0)
