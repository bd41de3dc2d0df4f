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
from common.service.status import fill_engine_status
from common.service.worker_process import WorkerContext
from kv_store.setup import KVEndpoint
from kv_store.transfer.events import PeerLost, TransferEvent
from prefill_svc.request import PrefillOutput
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillEngine


class PrefillWorker:
    """The prefill role of a worker process."""

    services: Sequence[str] = ("tandem.v1.Prefill",)

    def __init__(self, parts: EngineParts, context: WorkerContext, options: EngineOptions) -> None:
        identity = context.identity
        self._context = context
        self._kv = KVEndpoint(context, options, parts.runner.kv_cache.data, on_event=self._on_transfer_event)
        self._masks = MaskFiller()
        self._grammar_loader = GrammarLoader(parts.vocabulary)
        self._engine = PrefillEngine(
            runner=parts.runner,
            sampler=parts.sampler,
            masks=self._masks,
            pool=parts.pool,
            transfer=self._kv.transfer,
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
            transfer=self._kv.transfer,
            post=self._loop.post,
            load_grammar=self._grammar_loader.load,
            find_grammar=self._grammar_loader.find,
            tracer=context.tracer,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, server)
        self._kv.add_to(server)

    async def start(self, address: str) -> None:
        self._kv.start(address)
        self._loop.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._loop.stop, 5.0)
        await asyncio.to_thread(self._grammar_loader.close)
        await asyncio.to_thread(self._masks.close)
        await self._kv.stop()

    def refuse_new_work(self) -> None:
        self._servicer.draining = True

    def is_idle(self) -> bool:
        return self._engine.snapshot.is_idle and self._servicer.num_loading == 0

    def _emit(self, outputs: Sequence[PrefillOutput]) -> None:
        self._context.call_soon(self._servicer.deliver, outputs)

    def _on_transfer_event(self, event: TransferEvent) -> None:
        if isinstance(event, PeerLost):
            self._context.call_soon(self._servicer.drop_peer, event.peer, event.reason)
        else:
            self._loop.post(event)

    def fill_status(self, status: WorkerStatus) -> None:
        fill_engine_status(status, self._engine.snapshot)
        self._kv.fill_status(status)
        status.paired.extend(self._servicer.paired)
        status.refused.extend(f"{worker}: {reason}" for worker, reason in sorted(self._servicer.refused.items()))
