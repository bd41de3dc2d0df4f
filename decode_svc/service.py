"""The gRPC face of a decode worker: one stream per gateway, converted and handed on.

A gateway that reads slowly gets fewer, larger steps: outputs gather until it takes them, and the engine never waits.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import grpc.aio
from opentelemetry.trace import Tracer

from common.engine.grammar import Grammar
from common.errors import InvalidRequest
from common.pb.tandem.v1 import decode_pb2 as pb
from common.pb.tandem.v1 import decode_pb2_grpc
from common.pb.tandem.v1.worker_pb2 import Manifest
from common.rpc.convert import sampling_from_proto
from common.sampling import GrammarSpec
from common.telemetry.tracing import context_from, record_span
from decode_svc.convert import to_messages
from decode_svc.grammars import GrammarGate
from decode_svc.messages import (
    Cancel,
    DecodeOutput,
    FinishedOut,
    GatewayOut,
    RejectedOut,
    ShortageOut,
    StreamGone,
    Submit,
)
from decode_svc.prefill_pairs import PrefillPairs
from decode_svc.request import ChoicePrefix, DecodeRequest, PrefillTarget

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class GatewayStream:
    """What waits to be sent to one gateway."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._pending: list[GatewayOut] = []
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, output: GatewayOut) -> None:
        self._pending.append(output)
        self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    async def batches(self) -> AsyncIterator[list[GatewayOut]]:
        """All that is pending, each time that something is; ends when the stream is closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, []
            if pending:
                yield pending
            if self._closed:
                return


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Takes requests from gateways to the engine, and its outputs back.

    `post` hands a command to the engine thread; `deliver` must be called on the event loop with its outputs;
    `compile_grammar` is `GrammarCompiler.compile`.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        manifest: Manifest,
        pairs: PrefillPairs,
        post: Callable[[object], None],
        compile_grammar: Callable[[GrammarSpec], "Future[Grammar]"],
        tracer: Tracer,
    ) -> None:
        self._hello = pb.DecodeHello(worker_id=worker_id, incarnation=incarnation, manifest=manifest)
        self._worker_id = worker_id
        self._pairs = pairs
        self._post = post
        self._tracer = tracer
        self._streams: dict[str, GatewayStream] = {}
        self._grammars = GrammarGate(
            compile=compile_grammar, admit=self._admit, cancel=self._cancel, deliver=self.deliver
        )
        self.draining = False

    @property
    def num_compiling(self) -> int:
        """Requests that the engine will get when their grammar is compiled."""
        return len(self._grammars)

    async def Submit(self, request_iterator: AsyncIterator[pb.GatewayMessage], context: Context) -> AsyncIterator[Any]:
        messages = aiter(request_iterator)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of a stream must be Hello", field="hello")
        stream = GatewayStream(f"{first.hello.gateway_id}/{secrets.token_hex(4)}")
        self._streams[stream.key] = stream
        reader = asyncio.create_task(self._read(messages, stream))
        try:
            yield pb.DecodeMessage(hello=self._hello)
            async for batch in stream.batches():
                for message in to_messages(batch, self._worker_id):
                    yield message
            if reader.done():
                # What made it fail, if it did, ends the stream with its status.
                reader.result()
        finally:
            reader.cancel()
            del self._streams[stream.key]
            self._grammars.drop_stream(stream.key)
            self._post(StreamGone(stream.key))

    async def _read(self, messages: AsyncIterator[pb.GatewayMessage], stream: GatewayStream) -> None:
        try:
            async for message in messages:
                self._handle(message, stream)
        finally:
            stream.close()

    def _handle(self, message: pb.GatewayMessage, stream: GatewayStream) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(message.submit, stream)
            case "cancel":
                self._cancel(_to_cancel(message.cancel))
            case kind:
                _log.warning("ignored a message", extra={"kind": kind, "stream": stream.key})

    def _submit(self, submit: pb.SubmitRequest, stream: GatewayStream) -> None:
        for candidate in submit.prefill_candidates:
            self._pairs.want(candidate.address)
        reply_to = (stream.key, submit.request_id, submit.attempt)
        try:
            request = _to_request(submit, stream.key)
        except InvalidRequest as error:
            self.deliver([RejectedOut(*reply_to, error.field or "", error.message)])
            return
        if request.params.grammar is None:
            self._admit(request)
        elif self.draining:
            self.deliver([ShortageOut(*reply_to, "this worker is draining", retry_after=1.0)])
        else:
            self._grammars.submit(request)

    def _admit(self, request: DecodeRequest) -> None:
        self._post(Submit(request, draining=self.draining))

    def _cancel(self, cancel: Cancel) -> None:
        if not self._grammars.cancel(cancel):
            self._post(cancel)

    def deliver(self, outputs: Sequence[DecodeOutput]) -> None:
        """Carry the engine's outputs to gateways and prefill workers; a gateway that is gone gets nothing."""
        for output in outputs:
            if not isinstance(output, GatewayOut):
                self._pairs.dispatch(output)
                continue
            if isinstance(output, FinishedOut):
                self._trace(output)
            if (stream := self._streams.get(output.stream)) is not None:
                stream.put(output)

    def _trace(self, finished: FinishedOut) -> None:
        parent, timings = context_from(finished.traceparent), finished.timings
        total = finished.total_seconds
        filled_after = (timings.prefilled or timings.arrived) - timings.arrived
        attributes = {"tandem.worker": self._worker_id, "tandem.outcome": finished.outcome.value}
        if timings.prefill_worker == self._worker_id:
            record_span(
                self._tracer,
                "prefill",
                parent,
                timings.prefill_seconds,
                ended_ago=total - filled_after,
                attributes={**attributes, "tandem.local": True, "tandem.computed_tokens": timings.computed_tokens},
            )
        if timings.prefilled is not None:
            record_span(
                self._tracer,
                "decode",
                parent,
                total - filled_after,
                attributes={**attributes, "tandem.output_tokens": finished.output_tokens},
            )


def _to_cancel(message: pb.CancelRequest) -> Cancel:
    return Cancel(message.request_id, message.attempt, message.choice if message.HasField("choice") else None)


def _to_request(submit: pb.SubmitRequest, stream: str) -> DecodeRequest:
    return DecodeRequest(
        stream=stream,
        request_id=submit.request_id,
        attempt=submit.attempt,
        prompt_ids=tuple(submit.prompt_ids),
        choices=tuple(ChoicePrefix(tuple(choice.output_ids), choice.finished) for choice in submit.choices),
        params=sampling_from_proto(submit.sampling),
        prefill_targets=tuple(PrefillTarget(c.worker_id, c.address) for c in submit.prefill_candidates),
        cache_salt=submit.cache_salt,
        traceparent=submit.traceparent,
        timeout=submit.timeout_seconds or None,
    )
