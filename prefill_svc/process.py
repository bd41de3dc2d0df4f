"""A prefill worker as a process: builds engine, transfer thread and servicers, and runs them to the end."""

import asyncio
import logging
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from common.engine.loop import EngineLoop
from common.pb.tandem.v1 import prefill_pb2_grpc, worker_pb2_grpc
from common.pb.tandem.v1.worker_pb2 import ROLE_PREFILL, BlockCounts, WorkerState, WorkerStatus
from common.rpc.server import RpcServer
from common.service.engine_parts import EngineParts, build_engine_parts
from common.service.identity import WorkerIdentity
from common.service.lifecycle import Drainable, ShutdownSignal, listen, serve_until_shutdown
from common.service.options import EngineOptions, ProcessOptions
from common.service.status import StatusCollector, WorkerServicer
from common.telemetry.tracing import Tracing
from kv_store.setup import create_transfer, staging_counts
from kv_store.transfer.events import PeerLost, TransferEvent
from kv_store.transport.select import advertise, attach, create_transport
from prefill_svc.request import PrefillOutput
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillEngine

_log = logging.getLogger(__name__)

_SERVICES = ("tandem.v1.Prefill", "tandem.v1.Worker")


class PrefillProcess:
    """Everything of one prefill worker. `run` returns when it has drained."""

    def __init__(self, engine_options: EngineOptions, options: ProcessOptions) -> None:
        self._engine_options = engine_options
        self._options = options
        self._identity = WorkerIdentity.new("prefill", options.worker_id)
        self._state = WorkerState.WORKER_STATE_STARTING
        self._address = ""

    async def run(self) -> None:
        """Raises ConfigError or ModelError before serving, or what made a thread of the worker die."""
        self._loop = asyncio.get_running_loop()
        self._shutdown = ShutdownSignal()
        self._shutdown.install()
        tracing = Tracing("prefill", self._identity.worker_id)
        parts = await asyncio.to_thread(build_engine_parts, self._engine_options)
        self._build(parts, tracing)
        try:
            await self._serve(parts)
        finally:
            self._engine_loop.stop(timeout=5.0)
            self._transfer.close()
            await self._server.stop(grace=0.5)
            tracing.close()

    def _build(self, parts: EngineParts, tracing: Tracing) -> None:
        agent = f"{self._identity.worker_id}/{self._identity.incarnation}"
        self._transport = create_transport(self._engine_options.transport, agent)
        self._transfer = create_transfer(
            self._transport,
            self._identity.incarnation,
            self._engine_options,
            parts.runner.kv_cache.data,
            on_event=self._on_transfer_event,
        )
        self._engine = PrefillEngine(
            runner=parts.runner,
            sampler=parts.sampler,
            pool=parts.pool,
            transfer=self._transfer,
            pacer=parts.pacer,
            max_batch_size=self._engine_options.max_batch_size,
            max_prompt_tokens=parts.max_request_tokens,
            max_waiting=self._engine_options.max_waiting,
            emit=self._emit,
        )
        self._engine_loop = EngineLoop(
            self._engine, name="prefill-engine", on_fatal=self._shutdown.fail, on_stall=self._stalled
        )
        self._servicer = PrefillServicer(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            manifest=parts.manifest,
            transfer=self._transfer,
            post=self._engine_loop.post,
            tracer=tracing.tracer(),
        )
        self._worker_servicer = WorkerServicer(parts.manifest, self.status, self._shutdown.request)
        self._max_request_tokens = parts.max_request_tokens
        self._block_size = parts.pool.block_size

    async def _serve(self, parts: EngineParts) -> None:
        self._server = RpcServer()
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, self._server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._worker_servicer, self._server.grpc)
        attach(self._transport, self._server.grpc)
        self._transfer.start()
        self._engine_loop.start()
        self._address = await listen(self._server, self._options, _SERVICES)
        advertise(self._transport, self._address)
        self._state = WorkerState.WORKER_STATE_READY
        metrics = CollectorRegistry()
        metrics.register(StatusCollector(self.status))
        await serve_until_shutdown(
            identity=self._identity,
            model=parts.manifest.model,
            address=self._address,
            options=self._options,
            server=self._server,
            metrics=metrics,
            shutdown=self._shutdown,
            role=Drainable(self._begin_drain, self._is_idle),
        )

    def _emit(self, outputs: Sequence[PrefillOutput]) -> None:
        self._loop.call_soon_threadsafe(self._servicer.deliver, outputs)

    def _on_transfer_event(self, event: TransferEvent) -> None:
        if isinstance(event, PeerLost):
            self._loop.call_soon_threadsafe(self._servicer.drop_peer, event.peer, event.reason)
        else:
            self._engine_loop.post(event)

    def _stalled(self, seconds: float) -> None:
        self._shutdown.fail(RuntimeError(f"an engine step has not ended for {seconds:.0f} s"))

    async def _begin_drain(self) -> None:
        self._state = WorkerState.WORKER_STATE_DRAINING
        self._servicer.draining = True
        await self._worker_servicer.announce_change()

    def _is_idle(self) -> bool:
        snapshot = self._engine.snapshot
        return snapshot.running == 0 and snapshot.waiting == 0

    def status(self) -> WorkerStatus:
        """A snapshot; does not wait for the engine."""
        snapshot, counters = self._engine.snapshot, self._transfer.counters()
        figures = snapshot.figures
        return WorkerStatus(
            worker_id=self._identity.worker_id,
            role=ROLE_PREFILL,
            incarnation=self._identity.incarnation,
            pid=self._identity.pid,
            address=self._address,
            state=self._state,
            blocks=BlockCounts(
                total=snapshot.free + snapshot.cached + snapshot.owned,
                free=snapshot.free,
                cached=snapshot.cached,
                owned=snapshot.owned,
                block_size=self._block_size,
            ),
            staging=staging_counts(counters),
            running=snapshot.running,
            waiting=snapshot.waiting,
            queued_tokens=snapshot.queued_tokens,
            prefill_tokens_per_second=snapshot.tokens_per_second,
            max_request_tokens=self._max_request_tokens,
            paired=self._servicer.paired,
            refused=[f"{worker}: {reason}" for worker, reason in sorted(self._servicer.refused.items())],
            transfers=counters.open_sends,
            dropped_messages=sum(counters.dropped.values()),
            accepted_total=figures.accepted,
            finished_total=figures.finished,
            cancelled_total=figures.cancelled,
            failed_total=figures.failed,
        )
