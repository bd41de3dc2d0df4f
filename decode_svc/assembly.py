"""Puts a decode worker together: engine thread, transfer thread, pairs and servicer, and the paths between them."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from common.config import Address
from common.engine.grammar import STEP_SECONDS, MaskFiller
from common.engine.grammar.compiler import GrammarCompiler
from common.engine.grammar.start import ForkedProcess
from common.engine.loop import EngineLoop
from common.pb.tandem.v1 import decode_pb2_grpc
from common.pb.tandem.v1.worker_pb2 import WorkerStatus
from common.service.engine_parts import EngineParts
from common.service.options import EngineOptions
from common.service.status import fill_engine_status
from common.service.tasks import end_task, spawn_essential
from common.service.worker_process import WorkerContext
from decode_svc.discovery import PrefillDiscovery
from decode_svc.messages import DecodeOutput
from decode_svc.prefill_pairs import PrefillPairs
from decode_svc.service import DecodeServicer
from decode_svc.validation import RequestLimits
from decode_svc.worker import DecodeEngine
from kv_store.setup import KVEndpoint
from kv_store.transfer.events import CreditsReady, PeerLost, TransferEvent


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What only a decode worker has.

    Attributes:
        local_prefill_tokens: uncached prompt tokens up to which a prompt is prefilled here.
        prefill_timeout: seconds without a sign of life after which another prefill worker is tried.
        prefill: addresses to pair with, beside those found in the registry.
        redis: URL of the registry; empty: none.
    """

    local_prefill_tokens: int
    prefill_timeout: float
    prefill: tuple[Address, ...]
    redis: str


class DecodeWorker:
    """The decode role of a worker process."""

    services: Sequence[str] = ("tandem.v1.Decode",)

    def __init__(
        self,
        parts: EngineParts,
        context: WorkerContext,
        options: EngineOptions,
        own_options: DecodeOptions,
        compile_process: ForkedProcess | None = None,
    ) -> None:
        identity = context.identity
        self._context = context
        self._kv = KVEndpoint(context, options, parts.runner.kv_cache.data, on_event=self._on_transfer_event)
        self._pairs = PrefillPairs(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            manifest=parts.manifest,
            transfer=self._kv.transfer,
            post=self._post,
        )
        self._masks = MaskFiller(STEP_SECONDS)
        self._compiler = GrammarCompiler(parts.vocabulary, on_fatal=context.fail, first_process=compile_process)
        self._engine = self._build_engine(parts, options, own_options)
        self._loop = EngineLoop(self._engine, name="decode-engine", on_fatal=context.fail, on_stall=context.stalled)
        self._servicer = DecodeServicer(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            manifest=parts.manifest,
            pairs=self._pairs,
            post=self._post,
            compile_grammar=self._compiler.compile,
            tracer=context.tracer,
        )
        self._discovery = PrefillDiscovery(
            model=parts.manifest.model,
            redis=own_options.redis,
            configured=[str(address) for address in own_options.prefill],
            want=self._pairs.want,
        )
        self._discovering: asyncio.Task[None] | None = None

    def _build_engine(self, parts: EngineParts, options: EngineOptions, own_options: DecodeOptions) -> DecodeEngine:
        return DecodeEngine(
            worker_id=self._context.identity.worker_id,
            runner=parts.runner,
            sampler=parts.sampler,
            masks=self._masks,
            pool=parts.pool,
            transfer=self._kv.transfer,
            pacer=parts.pacer,
            limits=RequestLimits(parts.max_request_tokens, parts.manifest.vocab_size),
            eos_token_ids=parts.eos_token_ids,
            max_batch_size=options.max_batch_size,
            max_waiting=options.max_waiting,
            local_prefill_tokens=own_options.local_prefill_tokens,
            prefill_timeout=own_options.prefill_timeout,
            # Unique over decode workers and incarnations, whose transfers one prefill worker sees side by side.
            first_transfer_id=secrets.randbits(31) << 32,
            find_peer=self._pairs.find_peer,
            emit=self._emit,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self._servicer, server)
        self._kv.add_to(server)

    async def start(self, address: str) -> None:
        self._kv.start(address)
        self._compiler.start()
        self._loop.start()
        self._discovering = spawn_essential(self._discovery.run(), "prefill discovery", self._context.fail)

    async def stop(self) -> None:
        if self._discovering is not None:
            await end_task(self._discovering)
        await self._pairs.close()
        await asyncio.to_thread(self._compiler.close)
        await asyncio.to_thread(self._loop.stop, 5.0)
        await asyncio.to_thread(self._masks.close)
        await self._kv.stop()

    def refuse_new_work(self) -> None:
        self._servicer.draining = True

    def is_idle(self) -> bool:
        return self._engine.snapshot.is_idle and self._servicer.num_compiling == 0

    def _post(self, command: object) -> None:
        self._loop.post(command)

    def _emit(self, outputs: Sequence[DecodeOutput]) -> None:
        self._context.call_soon(self._servicer.deliver, outputs)

    def _on_transfer_event(self, event: TransferEvent) -> None:
        match event:
            case CreditsReady(peer, grants):
                self._context.call_soon(self._pairs.send_credits, peer, grants)
            case PeerLost(peer, reason):
                self._context.call_soon(self._pairs.drop_peer, peer, reason)
            case _:
                self._loop.post(event)

    def fill_status(self, status: WorkerStatus) -> None:
        fill_engine_status(status, self._engine.snapshot)
        self._kv.fill_status(status)
        status.paired.extend(self._pairs.paired)
        status.refused.extend(self._pairs.refused)
