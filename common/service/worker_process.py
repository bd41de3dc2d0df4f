"""A worker process from start to exit, whatever its role: load, listen, announce, serve, drain, stop.

What the role adds comes as a `Worker`; this module knows neither prefill nor decode nor KV transfer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from common.pb.tandem.v1 import worker_pb2 as pb
from common.pb.tandem.v1 import worker_pb2_grpc
from common.ports import check_port_is_free
from common.rpc.server import RpcServer
from common.service.engine_parts import EngineParts, build_engine_parts
from common.service.identity import WorkerIdentity, WorkerRole
from common.service.lifecycle import Drainable, ShutdownSignal, listen, serve_until_shutdown
from common.service.options import EngineOptions, ProcessOptions
from common.service.status import StatusCollector, WorkerServicer
from common.telemetry.tracing import Tracing

_log = logging.getLogger(__name__)

_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What the process lends to a role.

    Attributes:
        call_soon: runs a function on the event loop; from any thread.
        fail: brings the process down with an error; from any thread.
    """

    identity: WorkerIdentity
    tracer: Tracer
    call_soon: Callable[..., object]
    fail: Callable[[BaseException], None]

    def stalled(self, seconds: float) -> None:
        """An engine step does not end: only a restart can help."""
        self.fail(RuntimeError(f"an engine step has not ended for {seconds:.0f} s"))


class Worker(Protocol):
    """A role: its engine, its threads and its servicers."""

    #: Full names of its gRPC services.
    services: Sequence[str]

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add its servicers. Once, before the server listens."""
        ...

    async def start(self, address: str) -> None:
        """Start its threads and tasks; peers reach it under `address`. Must not wait for other processes."""
        ...

    async def stop(self) -> None:
        """End its threads and tasks, whatever still runs."""
        ...

    def refuse_new_work(self) -> None:
        """From now on it only finishes what it has."""
        ...

    def is_idle(self) -> bool:
        """Whether it has nothing left to finish."""
        ...

    def fill_status(self, status: pb.WorkerStatus) -> None:
        """Add the figures of the role; must not block."""
        ...


#: Builds a role's worker around a loaded engine. Runs on the event loop.
BuildWorker = Callable[[EngineParts, WorkerContext], Worker]


def run_worker(role: WorkerRole, engine_options: EngineOptions, options: ProcessOptions, build: BuildWorker) -> None:
    """Load the model, then serve until told to stop.

    Loading has no event loop and no signal handlers yet, so that SIGTERM and Ctrl-C end a slow start at once.

    Raises:
        ConfigError, ModelError: before anything serves; a port that is taken is found before the model is loaded.
        Exception: what made a thread of the worker die.
    """
    check_port_is_free(options.host, options.port, "--port")
    check_port_is_free(options.host, options.metrics_port, "--metrics-port")
    parts = build_engine_parts(engine_options)
    asyncio.run(WorkerProcess(role, parts, options, build).run())


class WorkerProcess:
    """Everything of one worker process but the loading. `run` returns when it has drained."""

    def __init__(self, role: WorkerRole, parts: EngineParts, options: ProcessOptions, build: BuildWorker) -> None:
        self._parts = parts
        self._options = options
        self._build = build
        self._identity = WorkerIdentity.new(role, options.worker_id)
        self._state = pb.WORKER_STATE_STARTING
        self._address = ""

    async def run(self) -> None:
        """Raises what made a thread of the worker die."""
        shutdown = ShutdownSignal()
        shutdown.install()
        tracing = Tracing(self._identity.role, self._identity.worker_id)
        context = WorkerContext(
            identity=self._identity,
            tracer=tracing.tracer(),
            call_soon=asyncio.get_running_loop().call_soon_threadsafe,
            fail=shutdown.fail,
        )
        self._worker = self._build(self._parts, context)
        server = RpcServer()
        try:
            await self._serve(server, shutdown)
        finally:
            await self._worker.stop()
            await server.stop(grace=0.5)
            tracing.close()

    async def _serve(self, server: RpcServer, shutdown: ShutdownSignal) -> None:
        servicer = WorkerServicer(self._parts.manifest, self.status, shutdown.request)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
        self._worker.add_to(server.grpc)
        self._address = await listen(server, self._options, (*self._worker.services, "tandem.v1.Worker"))
        await self._worker.start(self._address)
        self._state = pb.WORKER_STATE_READY
        metrics = CollectorRegistry()
        metrics.register(StatusCollector(self.status))
        await serve_until_shutdown(
            identity=self._identity,
            model=self._parts.manifest.model,
            address=self._address,
            options=self._options,
            server=server,
            metrics=metrics,
            shutdown=shutdown,
            role=Drainable(self._drain(servicer), self._worker.is_idle),
        )

    def _drain(self, servicer: WorkerServicer) -> Callable[[], Awaitable[None]]:
        async def begin() -> None:
            self._state = pb.WORKER_STATE_DRAINING
            self._worker.refuse_new_work()
            await servicer.announce_change()

        return begin

    def status(self) -> pb.WorkerStatus:
        """A snapshot; does not wait for the engine."""
        status = pb.WorkerStatus(
            worker_id=self._identity.worker_id,
            role=_ROLES[self._identity.role],
            incarnation=self._identity.incarnation,
            pid=self._identity.pid,
            address=self._address,
            state=self._state,
            blocks=pb.BlockCounts(total=self._parts.pool.num_blocks, block_size=self._parts.pool.block_size),
            max_request_tokens=self._parts.max_request_tokens,
        )
        self._worker.fill_status(status)
        return status
