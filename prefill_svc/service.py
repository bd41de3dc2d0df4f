"""The gRPC face of a prefill worker: one stream per decode worker, converted and handed on."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import grpc.aio
from opentelemetry.trace import Tracer

from common.engine.grammar import Grammar
from common.errors import InvalidRequest, ManifestMismatch, Overloaded
from common.manifest import require_match
from common.pb.tandem.v1 import prefill_pb2 as pb
from common.pb.tandem.v1 import prefill_pb2_grpc
from common.pb.tandem.v1.worker_pb2 import Manifest
from common.rpc.convert import logprobs_to_proto, sampling_from_proto
from common.sampling import GrammarKind
from common.telemetry.tracing import context_from, record_span
from kv_store.staging import SlotGrant
from kv_store.transfer.worker import KVTransfer
from kv_store.transport.base import PeerUnreachable
from prefill_svc.grammars import GrammarGate
from prefill_svc.request import (
    Cancel,
    Ended,
    FirstTokens,
    GrammarWanted,
    PeerGone,
    PrefillOutput,
    PrefillRequest,
    Progressed,
    PromptLogprobs,
    Run,
)

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

#: Refused decode workers that are remembered; those without a stable id come under a new one at each start.
MAX_REFUSED = 32

_OUTCOMES = {
    "ok": pb.TRANSFER_OUTCOME_OK,
    "cancelled": pb.TRANSFER_OUTCOME_CANCELLED,
    "shortage": pb.TRANSFER_OUTCOME_SHORTAGE,
    "rejected": pb.TRANSFER_OUTCOME_REJECTED,
    "failed": pb.TRANSFER_OUTCOME_FAILED,
}


class DecodePeer:
    """One paired decode worker: what goes out to it, in order."""

    def __init__(self, worker_id: str, incarnation: str) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        #: None ends the stream.
        self.outbox: asyncio.Queue[pb.PrefillEvent | None] = asyncio.Queue()
        #: Trace context by transfer, for the spans of finished requests.
        self.traceparents: dict[int, str] = {}


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Pairs with decode workers and carries their commands to the engine and its events back.

    `post` hands a command to the engine thread; `deliver` must be called on the event loop with its outputs;
    `load_grammar` and `find_grammar` are those of a `GrammarLoader`.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        manifest: Manifest,
        transfer: KVTransfer,
        post: Callable[[object], None],
        load_grammar: Callable[[GrammarKind, bytes], "Future[Grammar]"],
        find_grammar: Callable[[GrammarKind, bytes], "Future[Grammar | None]"],
        tracer: Tracer,
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._manifest = manifest
        self._transfer = transfer
        self._post = post
        self._tracer = tracer
        self._peers: dict[str, DecodePeer] = {}
        self._grammars = GrammarGate(load=load_grammar, find=find_grammar, admit=self._admit, deliver=self.deliver)
        #: Last reason for refusing a decode worker, by its id.
        self.refused: dict[str, str] = {}
        self.draining = False

    @property
    def paired(self) -> list[str]:
        return sorted(peer.worker_id for peer in self._peers.values())

    @property
    def num_loading(self) -> int:
        """Requests that the engine will get when their grammar is loaded."""
        return len(self._grammars)

    async def Run(self, request_iterator: AsyncIterator[pb.PrefillCommand], context: Context) -> AsyncIterator[Any]:
        commands = aiter(request_iterator)
        peer, hello = await self._pair(commands)
        reader = asyncio.create_task(self._read(commands, peer))
        try:
            yield pb.PrefillEvent(hello=hello)
            while (event := await peer.outbox.get()) is not None:
                yield event
            if reader.done():
                # What made it fail, if it did, ends the stream with its status.
                reader.result()
        finally:
            reader.cancel()
            self._unpair(peer)

    async def _pair(self, commands: AsyncIterator[pb.PrefillCommand]) -> tuple[DecodePeer, pb.PairHello]:
        first = await anext(commands, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of a pair must be Hello", field="hello")
        theirs = first.hello
        with self._remember_refusal(theirs.worker_id):
            require_match(self._manifest, theirs.manifest, peer=theirs.worker_id)
            peer = await self._connect(theirs)
        _log.info("paired", extra={"decode_worker": peer.worker_id, "transport": theirs.transport.transport})
        return peer, pb.PairHello(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            manifest=self._manifest,
            transport=self._transfer.local_peer(),
        )

    async def _connect(self, theirs: pb.PairHello) -> DecodePeer:
        """Raises ManifestMismatch where the two transports do not fit, Overloaded where trying again may help."""
        if theirs.incarnation in self._peers:
            # Its former stream is half-open; keepalive ends it within seconds and the decode worker tries again.
            raise Overloaded(f"{theirs.worker_id} is paired already", retry_after=1.0)
        peer = self._peers[theirs.incarnation] = DecodePeer(theirs.worker_id, theirs.incarnation)
        try:
            await asyncio.wrap_future(self._transfer.connect(peer.incarnation, theirs.transport, receive=False))
        except BaseException as error:
            self._unpair(peer)
            if isinstance(error, ValueError):
                raise ManifestMismatch(f"cannot pair with {peer.worker_id}: {error}", field="transport") from error
            if isinstance(error, PeerUnreachable):
                raise Overloaded(f"cannot pair with {peer.worker_id}: {error}", retry_after=1.0) from error
            raise
        return peer

    @contextlib.contextmanager
    def _remember_refusal(self, worker_id: str):  # type: ignore[no-untyped-def]
        try:
            yield
        except ManifestMismatch as error:
            self.refused.pop(worker_id, None)
            self.refused[worker_id] = str(error)
            if len(self.refused) > MAX_REFUSED:
                del self.refused[next(iter(self.refused))]
            _log.error("refused a pair: %s", error)
            raise
        self.refused.pop(worker_id, None)

    def _unpair(self, peer: DecodePeer) -> None:
        if self._peers.pop(peer.incarnation, None) is None:
            return
        self._grammars.drop_peer(peer.incarnation)
        self._post(PeerGone(peer.incarnation))
        self._transfer.disconnect(peer.incarnation)
        _log.info("unpaired", extra={"decode_worker": peer.worker_id})

    async def _read(self, commands: AsyncIterator[pb.PrefillCommand], peer: DecodePeer) -> None:
        try:
            async for command in commands:
                self._handle(command, peer)
        finally:
            peer.outbox.put_nowait(None)

    def _handle(self, command: pb.PrefillCommand, peer: DecodePeer) -> None:
        match command.WhichOneof("message"):
            case "run":
                self._run(command.run, peer)
            case "cancel":
                cancel = Cancel(peer.incarnation, command.cancel.transfer_id)
                if not self._grammars.cancel(cancel):
                    self._post(cancel)
            case "credit":
                grants = tuple(SlotGrant(grant.slot, grant.generation) for grant in command.credit.grants)
                self._transfer.add_credits(peer.incarnation, grants)
            case "grammar":
                supplied = command.grammar
                self._grammars.supply(peer.incarnation, supplied.transfer_id, supplied.compiled_grammar)
            case kind:
                _log.warning("ignored a command", extra={"kind": kind, "decode_worker": peer.worker_id})

    def _run(self, run: pb.RunRequest, peer: DecodePeer) -> None:
        if self.draining:
            ended = Ended(peer.incarnation, run.transfer_id, "shortage", "this worker is draining")
            peer.outbox.put_nowait(_to_event(ended))
            return
        peer.traceparents[run.transfer_id] = run.traceparent
        try:
            request = _to_request(run, peer.incarnation)
        except InvalidRequest as error:
            words = f"{error.field}: {error.message}"
            self.deliver([Ended(peer.incarnation, run.transfer_id, "rejected", words)])
            return
        match run.WhichOneof("compiled"):
            case "compiled_grammar":
                self._grammars.submit(request, run.compiled_grammar)
            case "grammar_digest":
                self._grammars.submit_known(request, run.grammar_digest)
            case _:
                self._admit(request)

    def _admit(self, request: PrefillRequest) -> None:
        self._post(Run(request))

    def deliver(self, outputs: Sequence[PrefillOutput]) -> None:
        """Send the engine's outputs to the streams of their peers; those of a lost peer have no one to go to."""
        for output in outputs:
            peer = self._peers.get(output.peer)
            if peer is None:
                continue
            if isinstance(output, Ended):
                self._trace(output, peer.traceparents.pop(output.transfer_id, ""))
            peer.outbox.put_nowait(_to_event(output))

    def drop_peer(self, incarnation: str, reason: str) -> None:
        """The transport has lost this peer: end its stream, so that it pairs anew."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            _log.warning("lost a decode worker", extra={"decode_worker": peer.worker_id, "reason": reason})
            peer.outbox.put_nowait(None)

    def _trace(self, ended: Ended, traceparent: str) -> None:
        parent = context_from(traceparent)
        record_span(
            self._tracer,
            "prefill",
            parent,
            ended.prefill_seconds,
            ended_ago=ended.since_compute_seconds,
            attributes={
                "tandem.worker": self._worker_id,
                "tandem.outcome": ended.outcome,
                "tandem.cached_tokens": ended.cached_tokens,
                "tandem.computed_tokens": ended.computed_tokens,
            },
        )
        record_span(
            self._tracer,
            "transfer",
            parent,
            ended.transfer_seconds,
            attributes={"tandem.bytes": ended.bytes, "tandem.messages": ended.messages},
        )


def _to_request(run: pb.RunRequest, peer: str) -> PrefillRequest:
    return PrefillRequest(
        peer=peer,
        transfer_id=run.transfer_id,
        request_id=run.request_id,
        prompt_ids=tuple(run.prompt_ids),
        first_token=run.first_token,
        first_choices=tuple(run.first_choices),
        params=sampling_from_proto(run.sampling),
        cache_salt=run.cache_salt,
        traceparent=run.traceparent,
    )


def _to_event(output: PrefillOutput) -> pb.PrefillEvent:
    match output:
        case FirstTokens():
            return pb.PrefillEvent(first=_to_first(output))
        case PromptLogprobs():
            return pb.PrefillEvent(
                prompt_logprobs=pb.PromptLogprobs(
                    transfer_id=output.transfer_id,
                    first_position=output.first_position,
                    entries=[logprobs_to_proto(entry) for entry in output.entries],
                )
            )
        case Progressed():
            return pb.PrefillEvent(progress=pb.Progress(transfer_id=output.transfer_id, tokens_done=output.tokens_done))
        case GrammarWanted():
            return pb.PrefillEvent(grammar_wanted=pb.GrammarWanted(transfer_id=output.transfer_id))
        case Ended():
            return pb.PrefillEvent(
                terminal=pb.Terminal(
                    transfer_id=output.transfer_id,
                    outcome=_OUTCOMES[output.outcome],
                    message=output.message,
                    messages=output.messages,
                    bytes=output.bytes,
                    cached_tokens=output.cached_tokens,
                    computed_tokens=output.computed_tokens,
                    prefill_seconds=output.prefill_seconds,
                    since_compute_seconds=output.since_compute_seconds,
                    transfer_seconds=output.transfer_seconds,
                )
            )


def _to_first(output: FirstTokens) -> pb.First:
    tokens = [
        pb.FirstToken(
            choice=choice,
            token_id=token.token_id,
            logprobs=None if token.logprobs is None else logprobs_to_proto(token.logprobs),
        )
        for choice, token in output.tokens
    ]
    return pb.First(transfer_id=output.transfer_id, tokens=tokens, cached_tokens=output.cached_tokens)
