"""Puts a prefill worker together: engine thread, transfer thread and servicer, and the paths between them."""

import asyncio
from collections.abc import Sequence

import grpc.aio

from common.engine.grammar import MaskFiller
from common.engine.grammar.loader import GrammarLoader
from common.engine.loop import EngineLoop
from common.pb.tandem.v1 import prefill_pb2_grpc
from common.pb.tandem.v1.worker_pb2 import WorkerStatus
from common.service.engine_parts import EngineParts
from common.service.options import EngineOptions
from common.service.worker_process import WorkerContext
from kv_store.setup import create_transfer, fill_transfer_status
from kv_store.transfer.events import PeerLost, TransferEvent
from kv_store.transport.select import advertise, attach, create_transport
from prefill_svc.request import PrefillOutput
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillEngine


class PrefillWorker:
    """The prefill role of a worker process."""

    services: Sequence[str] = ("tandem.v1.Prefill",)

    def __init__(self, parts: EngineParts, context: WorkerContext, options: EngineOptions) -> None:
        identity = context.identity
        self._context = context
        self._transport = create_transport(options.transport, f"{identity.worker_id}/{identity.incarnation}")
        self._transfer = create_transfer(
            self._transport,
            identity.incarnation,
            options,
            parts.runner.kv_cache.data,
            on_event=self._on_transfer_event,
            on_failure=context.fail,
        )
        self._masks = MaskFiller()
        self._grammar_loader = GrammarLoader(parts.vocabulary)
        self._engine = PrefillEngine(
            runner=parts.runner,
            sampler=parts.sampler,
            masks=self._masks,
            pool=parts.pool,
            transfer=self._transfer,
            pacer=parts.pacer,
            max_batch_size=options.max_batch_size,
            max_prompt_tokens=parts.max_request_tokens,
            vocab_size=parts.manifest.vocab_size,
            max_waiting=options.max_waiting,
            emit=self._emit,
        )
        self._loop = EngineLoop(self._engine, name="prefill-engine", on_fatal=context.fail, on_stall=context.stalled)
        self._servicer = PrefillServicer(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            manifest=parts.manifest,
            transfer=self._transfer,
            post=self._loop.post,
            load_grammar=self._grammar_loader.load,
            find_grammar=self._grammar_loader.find,
            tracer=context.tracer,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, server)
        attach(self._transport, server)

    async def start(self, address: str) -> None:
        advertise(self._transport, address)
        self._transfer.start()
        self._loop.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._loop.stop, 5.0)
        await asyncio.to_thread(self._grammar_loader.close)
        await asyncio.to_thread(self._masks.close)
        await asyncio.to_thread(self._transfer.close)

    def refuse_new_work(self) -> None:
        self._servicer.draining = True

    def is_idle(self) -> bool:
        snapshot = self._engine.snapshot
        return snapshot.running == 0 and snapshot.waiting == 0 and self._servicer.num_loading == 0

    def _emit(self, outputs: Sequence[PrefillOutput]) -> None:
        self._context.call_soon(self._servicer.deliver, outputs)

    def _on_transfer_event(self, event: TransferEvent) -> None:
        if isinstance(event, PeerLost):
            self._context.call_soon(self._servicer.drop_peer, event.peer, event.reason)
        else:
            self._loop.post(event)

    def fill_status(self, status: WorkerStatus) -> None:
        snapshot, figures = self._engine.snapshot, self._engine.snapshot.figures
        fill_transfer_status(status, self._transfer.counters())
        status.blocks.free, status.blocks.cached, status.blocks.owned = snapshot.free, snapshot.cached, snapshot.owned
        status.running, status.waiting = snapshot.running, snapshot.waiting
        status.queued_tokens = snapshot.queued_tokens
        status.prefill_tokens_per_second = snapshot.tokens_per_second
        status.paired.extend(self._servicer.paired)
        status.refused.extend(f"{worker}: {reason}" for worker, reason in sorted(self._servicer.refused.items()))
        status.accepted_total, status.finished_total = figures.accepted, figures.finished
        status.cancelled_total, status.failed_total = figures.cancelled, figures.failed
        status.tokens_computed_total, status.tokens_cached_total = figures.tokens_computed, figures.tokens_cached
        status.steps_total, status.busy_seconds_total = figures.steps, figures.busy_seconds
