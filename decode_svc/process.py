"""A decode worker as a process: builds engine, transfer thread, pairs and servicers, and runs them to the end."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from common.config import Address
from common.engine.loop import EngineLoop
from common.pb.tandem.v1 import decode_pb2_grpc, worker_pb2_grpc
from common.pb.tandem.v1.worker_pb2 import ROLE_DECODE, BlockCounts, WorkerState, WorkerStatus
from common.redis_client import open_redis
from common.registry import REDIS_ERRORS, read_workers
from common.rpc.server import RpcServer
from common.service.engine_parts import EngineParts, build_engine_parts
from common.service.identity import WorkerIdentity
from common.service.lifecycle import Drainable, ShutdownSignal, listen, serve_until_shutdown
from common.service.options import EngineOptions, ProcessOptions
from common.service.status import StatusCollector, WorkerServicer
from common.telemetry.tracing import Tracing
from decode_svc.messages import DecodeOutput
from decode_svc.prefill_pairs import PrefillPairs
from decode_svc.service import DecodeServicer
from decode_svc.validation import RequestLimits
from decode_svc.worker import DecodeEngine
from kv_store.setup import create_transfer, staging_counts
from kv_store.transfer.events import CreditsReady, PeerLost, TransferEvent
from kv_store.transport.select import advertise, attach, create_transport

_log = logging.getLogger(__name__)

_SERVICES = ("tandem.v1.Decode", "tandem.v1.Worker")

#: How often the registry is asked for prefill workers to pair with.
DISCOVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What only a decode worker has.

    Attributes:
        local_prefill_tokens: uncached prompt tokens up to which a prompt is prefilled here.
        prefill_timeout: seconds without a sign of life after which another prefill worker is tried.
        prefill: addresses to pair with, beside those found in the registry.
    """

    local_prefill_tokens: int
    prefill_timeout: float
    prefill: tuple[Address, ...]


class DecodeProcess:
    """Everything of one decode worker. `run` returns when it has drained."""

    def __init__(self, engine_options: EngineOptions, options: ProcessOptions, decode_options: DecodeOptions) -> None:
        self._engine_options = engine_options
        self._options = options
        self._decode_options = decode_options
        self._identity = WorkerIdentity.new("decode", options.worker_id)
        self._state = WorkerState.WORKER_STATE_STARTING
        self._address = ""

    async def run(self) -> None:
        """Raises ConfigError or ModelError before serving, or what made a thread of the worker die."""
        self._loop = asyncio.get_running_loop()
        self._shutdown = ShutdownSignal()
        self._shutdown.install()
        tracing = Tracing("decode", self._identity.worker_id)
        parts = await asyncio.to_thread(build_engine_parts, self._engine_options)
        self._build(parts, tracing)
        try:
            await self._serve(parts)
        finally:
            await self._pairs.close()
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
        self._pairs = PrefillPairs(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            manifest=parts.manifest,
            transfer=self._transfer,
            post=self._post,
        )
        self._engine = DecodeEngine(
            worker_id=self._identity.worker_id,
            runner=parts.runner,
            sampler=parts.sampler,
            pool=parts.pool,
            transfer=self._transfer,
            pacer=parts.pacer,
            limits=RequestLimits(parts.max_request_tokens, parts.manifest.vocab_size),
            eos_token_ids=parts.eos_token_ids,
            max_batch_size=self._engine_options.max_batch_size,
            max_waiting=self._engine_options.max_waiting,
            local_prefill_tokens=self._decode_options.local_prefill_tokens,
            prefill_timeout=self._decode_options.prefill_timeout,
            # Unique over decode workers and incarnations, whose transfers one prefill worker sees side by side.
            first_transfer_id=secrets.randbits(31) << 32,
            find_peer=self._pairs.find_peer,
            emit=self._emit,
        )
        self._engine_loop = EngineLoop(
            self._engine, name="decode-engine", on_fatal=self._shutdown.fail, on_stall=self._stalled
        )
        self._servicer = DecodeServicer(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            manifest=parts.manifest,
            pairs=self._pairs,
            post=self._post,
            tracer=tracing.tracer(),
        )
        self._worker_servicer = WorkerServicer(parts.manifest, self.status, self._shutdown.request)
        self._max_request_tokens = parts.max_request_tokens
        self._block_size = parts.pool.block_size

    async def _serve(self, parts: EngineParts) -> None:
        self._server = RpcServer()
        decode_pb2_grpc.add_DecodeServicer_to_server(self._servicer, self._server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._worker_servicer, self._server.grpc)
        attach(self._transport, self._server.grpc)
        self._transfer.start()
        self._engine_loop.start()
        self._address = await listen(self._server, self._options, _SERVICES)
        advertise(self._transport, self._address)
        self._state = WorkerState.WORKER_STATE_READY
        metrics = CollectorRegistry()
        metrics.register(StatusCollector(self.status))
        async with self._discovery(parts.manifest.model):
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

    @contextlib.asynccontextmanager
    async def _discovery(self, model: str):  # type: ignore[no-untyped-def]
        """Pair with every prefill worker that is configured or announced."""
        for address in self._decode_options.prefill:
            self._pairs.want(str(address))
        task = asyncio.create_task(self._discover(model)) if self._options.redis else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _discover(self, model: str) -> None:
        redis = open_redis(self._options.redis)
        try:
            while True:
                try:
                    workers = await read_workers(redis, model)
                except REDIS_ERRORS as error:
                    # Pairs live on without it; the announcer has logged the outage.
                    _log.debug("registry not readable", extra={"error": str(error)})
                    workers = []
                for worker in workers:
                    if worker.role == "prefill":
                        self._pairs.want(worker.address)
                for address in self._decode_options.prefill:
                    self._pairs.want(str(address))
                await asyncio.sleep(DISCOVERY_SECONDS)
        finally:
            await redis.aclose()

    def _post(self, command: object) -> None:
        self._engine_loop.post(command)

    def _emit(self, outputs: Sequence[DecodeOutput]) -> None:
        self._loop.call_soon_threadsafe(self._servicer.deliver, outputs)

    def _on_transfer_event(self, event: TransferEvent) -> None:
        match event:
            case CreditsReady(peer, grants):
                self._loop.call_soon_threadsafe(self._pairs.send_credits, peer, grants)
            case PeerLost(peer, reason):
                self._loop.call_soon_threadsafe(self._pairs.drop_peer, peer, reason)
            case _:
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
            role=ROLE_DECODE,
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
            prefill_tokens_per_second=snapshot.prefill_tokens_per_second,
            decode_tokens_per_second=snapshot.decode_tokens_per_second,
            max_request_tokens=self._max_request_tokens,
            paired=self._pairs.paired,
            refused=self._pairs.refused,
            transfers=snapshot.transfers,
            dropped_messages=sum(counters.dropped.values()),
            accepted_total=figures.accepted,
            finished_total=figures.finished,
            cancelled_total=figures.cancelled,
            failed_total=figures.failed,
            preemptions_total=snapshot.preemptions,
        )
