"""Assembles a gateway from its parts and runs it: start, serve, drain, stop. Knows every part, does nothing itself.

HTTP and gRPC edges -> ClusterDispatcher -> GatewayQueue (admission), Placement (routing) -> decode workers
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from common.config import Address
from common.pb.tandem.v1 import inference_pb2_grpc
from common.redis_client import open_redis
from common.rpc.server import RpcServer
from common.telemetry.tracing import Tracing
from common.text.tokenizer_files import read_json, tokenizer_fingerprint
from gateway.accounting import EdgeMetrics
from gateway.capacity import prefill_capacity, prefill_speed
from gateway.cluster.membership import Cluster
from gateway.cluster.views import Expectation, WorkerRole, WorkerView
from gateway.dispatch.connection import DecodeConnections
from gateway.dispatch.dispatcher import ClusterDispatcher
from gateway.dispatch.loads import Loads
from gateway.dispatch.placement import Placement
from gateway.generation import ServingLimits
from gateway.http.app import create_app
from gateway.http.listen import bind
from gateway.http.responses.open_store import open_store
from gateway.http.services import HttpOptions, HttpServices
from gateway.http.wire import JsonH11Protocol
from gateway.planner.sizing import measured_speeds, size
from gateway.planner.traffic import TrafficWindow
from gateway.prefixes import PrefixIndex
from gateway.process import HttpServer, shutdown_signals, wait_for
from gateway.queue.admission import GatewayQueue
from gateway.router import PrefillPolicy, Router
from gateway.rpc import InferenceServicer
from gateway.rpc.auth import KeyInterceptor
from gateway.serving import ServingModel
from gateway.status import GatewayStatus, StatusCollector, status_router
from gateway.tasks import Fatal, end, spawn
from gateway.tenants import ApiKeys

_log = logging.getLogger(__name__)

_RPC_SERVICE = "tandem.v1.Inference"
#: What connections may take to close once nothing runs any more.
_CLOSE_SECONDS = 5
#: Where a model folder does not say.
_UNKNOWN_LENGTH = 2**31


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything a gateway is told at start."""

    #: Folder with tokenizer, template and config of the model.
    model_folder: Path
    #: Name under which clients and workers know it.
    model_name: str
    #: Where the edges listen; port 0 takes a free one.
    http: Address
    grpc: Address
    #: URL; empty: no registry, and a queue of this gateway alone.
    redis: str = ""
    #: Workers that need no registry.
    peers: tuple[tuple[WorkerRole, str], ...] = ()
    #: Bound on waiting requests.
    max_queue: int = 1024
    cors_origins: tuple[str, ...] = ()
    #: Who may call; none: everybody.
    keys: ApiKeys = field(default_factory=ApiKeys)
    max_body_bytes: int = 8 * 1024 * 1024
    #: Seconds for which answers of the Responses API are kept; 0: none is.
    response_ttl: int = 3600
    #: Prompts with up to so many uncached tokens are prefilled on the decode worker.
    local_prefill_tokens: int = 32
    prefill_policy: PrefillPolicy = PrefillPolicy.COST
    #: How the model writes tool calls and thoughts: one of TOOL_PARSERS, of REASONING_PARSERS.
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    #: Seconds to wait for a decode worker when the last one was lost.
    worker_wait: float = 15.0
    #: Workers on which one request may fail.
    max_attempts: int = 3
    #: Longest wait for running requests on SIGTERM, in seconds.
    drain_seconds: float = 30.0


class Gateway:
    """One gateway process (or several of them in one test)."""

    def __init__(self, config: GatewayConfig) -> None:
        """Reads the model folder. Raises ConfigError or ModelError."""
        self.config = config
        self.gateway_id = f"gateway-{secrets.token_hex(4)}"
        self._draining = False
        self._fatal = Fatal()
        self._tracing = Tracing("gateway", self.gateway_id)
        self._model = ServingModel.load(
            config.model_folder,
            config.model_name,
            tool_parser=config.tool_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self._redis = open_redis(config.redis) if config.redis else None
        fingerprint = tokenizer_fingerprint(config.model_folder)
        self.cluster = Cluster(
            Expectation(config.model_name, fingerprint),
            peers=config.peers,
            redis=self._redis,
            on_death=self._fatal.report,
        )
        self.queue = GatewayQueue(
            self._redis,
            config.model_name,
            self.gateway_id,
            capacity=lambda: prefill_capacity(self.cluster.workers()),
            speed=lambda: prefill_speed(self.cluster.workers()),
            max_waiting=config.max_queue,
            weights=config.keys.weight_of,
            on_death=self._fatal.report,
        )
        self._traffic = TrafficWindow()
        self._connections = DecodeConnections(self.gateway_id)
        self.dispatcher = self._build_dispatcher(self._tracing.tracer())
        self._capacity = 0
        self._metrics = EdgeMetrics(CollectorRegistry())
        self._metrics.registry.register(StatusCollector(self.status))
        self._rpc: RpcServer | None = None
        self._http = HttpServer(self._build_http())
        self._http_task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        #: Where the edges really listen (port 0 takes a free one).
        self.http_address = config.http
        self.grpc_address = config.grpc

    def _build_dispatcher(self, tracer: Tracer) -> ClusterDispatcher:
        prefixes, loads = PrefixIndex(), Loads()
        self.cluster.add_gone_listener(prefixes.drop)
        self.cluster.add_gone_listener(loads.forget)
        router = Router(local_prefill_tokens=self.config.local_prefill_tokens, policy=self.config.prefill_policy)
        placement = Placement(
            self.cluster, self._connections, router, prefixes, loads, tracer, patience=self.config.worker_wait
        )
        return ClusterDispatcher(
            self.cluster,
            self.queue,
            placement,
            prefixes,
            self._traffic,
            tracer,
            model_limits=_model_limits(self.config.model_folder),
            max_attempts=self.config.max_attempts,
        )

    def _build_http(self) -> uvicorn.Config:
        options = HttpOptions(max_body_bytes=self.config.max_body_bytes, cors_origins=self.config.cors_origins)
        services = HttpServices(
            self._model,
            self.dispatcher,
            self._metrics,
            self.readiness,
            options,
            self._tracing.tracer(),
            self.config.keys,
            open_store(self._redis, self.config.model_name, self.config.response_ttl),
        )
        app = create_app(services)
        app.include_router(status_router(self.status))
        return uvicorn.Config(
            app,
            http=JsonH11Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )

    # --- what is asked of it --------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, str]:
        """Whether requests can be served, and why not. A ready decode worker can also prefill."""
        if self._draining:
            return False, "the gateway is draining"
        if self._fatal.error is not None:
            return False, f"the gateway is failing: {self._fatal.error}"
        if not self.cluster.routable("decode"):
            return False, "no decode worker is ready"
        return True, ""

    def status(self) -> GatewayStatus:
        workers = self.cluster.workers()
        state = "draining" if self._draining else "ready" if self.readiness()[0] else "waiting"
        return GatewayStatus(
            self.gateway_id,
            self.config.model_name,
            state,
            self.dispatcher.running,
            tuple(workers),
            self.queue.figures,
            size(self._traffic.traffic, *measured_speeds(workers)),
            self._traffic.transfers,
        )

    # --- life -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, then look for workers. Raises ConfigError naming the option if a port is taken."""
        listener = bind(self.config.http.host, self.config.http.port)
        self.http_address = Address(self.config.http.host, listener.getsockname()[1])
        keys = self.config.keys
        rpc = self._rpc = RpcServer(
            max_message_bytes=self.config.max_body_bytes, interceptors=[KeyInterceptor(keys)] if keys.required else []
        )
        servicer = InferenceServicer(self._model, self.dispatcher, self._metrics, self._tracing.tracer(), keys)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, rpc.grpc)
        try:
            address = self.config.grpc
            grpc_port = await rpc.start(address.host, address.port, [_RPC_SERVICE], option="--grpc-port")
        except BaseException:
            listener.close()
            raise
        self.grpc_address = Address(self.config.grpc.host, grpc_port)
        self.cluster.add_listener(self._on_worker)
        await self.queue.start()
        await self.cluster.start()
        self._tasks.append(spawn(self._follow_readiness(rpc), "readiness", self._fatal.report))
        self._http_task = spawn(self._http.serve(sockets=[listener]), "http", self._fatal.report)
        _log.info(
            "gateway listening",
            extra={
                "http": str(self.http_address),
                "grpc": str(self.grpc_address),
                "gateway": self.gateway_id,
                "api_keys": "required" if keys.required else "none: open to everybody",
            },
        )

    def _on_worker(self, _view: WorkerView) -> None:
        capacity = prefill_capacity(self.cluster.workers())
        if capacity > self._capacity:
            self.queue.poke()
        self._capacity = capacity

    async def _follow_readiness(self, rpc: RpcServer) -> None:
        """Keep the standard gRPC health service true."""
        while True:
            await rpc.set_serving(self.readiness()[0])
            await self.cluster.changed()

    async def run(self) -> None:
        """Start, serve until SIGTERM or SIGINT, drain, stop. A second signal stops at once.

        Raises ConfigError if a port is taken, and TaskDied, after having stopped in order, if a task without which no
        request can be served has ended: a process that does nothing must not seem alive to its supervisor.
        """
        with shutdown_signals() as (first, second):
            try:
                await self.start()
                await self._until(first)
                await self.drain(second)
                self._fatal.raise_if_any()
            finally:
                await self.stop()

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Refuse new requests, give running ones their time. Returns when none runs, or the time or `hurry` is up."""
        _log.info("draining", extra={"running": self.dispatcher.running})
        self._draining = True
        self.dispatcher.drain()
        if self._rpc is not None:
            await self._rpc.set_serving(False)
        waits = [spawn(self.dispatcher.idle(), "idle"), spawn(wait_for(self._fatal.happened), "fatal")]
        if hurry is not None:
            waits.append(spawn(wait_for(hurry), "hurry"))
        await asyncio.wait(waits, timeout=self.config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        await end(waits)

    async def _until(self, signalled: asyncio.Event) -> None:
        """Wait for the signal, or for the death of an essential task, which is raised."""
        waits = [spawn(wait_for(signalled), "signal"), spawn(wait_for(self._fatal.happened), "fatal")]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await end(waits)
        self._fatal.raise_if_any()

    async def stop(self) -> None:
        """End what still runs with an error, close everything. Also after a failed start."""
        self.dispatcher.drain()
        self.dispatcher.abort()
        # Who still waits for admission hears it now, while its connection is open.
        await self.queue.close()
        self._http.should_exit = True
        if self._http_task is not None:
            await asyncio.gather(self._http_task, return_exceptions=True)
        if self._rpc is not None:
            await self._rpc.stop(_CLOSE_SECONDS)
        await end(self._tasks)
        await self._connections.close()
        await self.cluster.close()
        if self._redis is not None:
            await self._redis.aclose()
        self._tracing.close()
        _log.info("gateway stopped", extra={"gateway": self.gateway_id})


def _model_limits(folder: Path) -> ServingLimits:
    """What the model's own config says, for the time until a worker has told."""
    config = read_json(folder / "config.json")
    length, vocabulary = config.get("max_position_embeddings"), config.get("vocab_size")
    return ServingLimits(
        length if isinstance(length, int) else _UNKNOWN_LENGTH,
        vocabulary if isinstance(vocabulary, int) else _UNKNOWN_LENGTH,
    )
