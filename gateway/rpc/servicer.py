"""`tandem.v1.Inference`: proto in, one call, proto out. Checks and text are those of the HTTP edge.

Handlers are async generators and just raise: the server's error interceptor (`common.rpc.status`) has the table from
errors to statuses. A client that cancels or runs into its deadline closes the handler, which frees everything.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer

from common.errors import InvalidRequest, TandemError
from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from common.telemetry.tracing import context_from
from gateway.accounting import EdgeMetrics, RequestRecord, request_id
from gateway.answer import Answer, open_answer
from gateway.chat.answer import ChatAnswer
from gateway.chat.prepare import prepare_chat
from gateway.completion import ChoiceDelta
from gateway.generation import Dispatcher
from gateway.options import GenerationOptions
from gateway.prompts import text_ids
from gateway.rpc.auth import tenant_of
from gateway.rpc.chat import CHAT_FIELDS, chat_delta_to_proto, chat_from_proto
from gateway.rpc.convert import delta_to_proto, options_from_proto, prompt_to_proto, summary_to_proto
from gateway.rpc.deadline import seconds_left
from gateway.rpc.structured import grammar_from_proto
from gateway.rpc.tokenize import detokenize_call, tokenize_call
from gateway.serving import ServingModel
from gateway.tenants import ApiKeys
from gateway.validation import PreparedRequest, check_options, check_prompt, prepare

_SERVICE = "tandem.v1.Inference"

Context = grpc.aio.ServicerContext[Any, Any]
Responses = AsyncGenerator[inference_pb2.GenerateResponse, None]


@dataclass(frozen=True, slots=True)
class _Call:
    """A request ready to be answered, and how its deltas are written."""

    prepared: PreparedRequest
    write: Callable[[int, ChoiceDelta], inference_pb2.TextDelta]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves one model through a dispatcher."""

    def __init__(
        self,
        model: ServingModel,
        dispatcher: Dispatcher,
        metrics: EdgeMetrics,
        tracer: Tracer | None = None,
        keys: ApiKeys | None = None,
    ) -> None:
        """`keys`: those that the server's interceptor asks for (`gateway.rpc.auth`), to tell tenants apart."""
        self._model = model
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tracer = tracer if tracer is not None else trace.get_tracer("tandem.gateway")
        self._keys = keys if keys is not None else ApiKeys()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> Responses:
        """Completes a prompt. Raises TandemError."""
        async with aclosing(self._serve("Generate", context, self._prepare_generate(request, context))) as responses:
            async for response in responses:
                yield response

    async def Chat(self, request: inference_pb2.ChatRequest, context: Context) -> Responses:
        """Completes a conversation. Raises TandemError."""
        async with aclosing(self._serve("Chat", context, self._prepare_chat(request, context))) as responses:
            async for response in responses:
                yield response

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a conversation. Raises TandemError."""
        with self._observed("Tokenize", context):
            return await tokenize_call(request, self._model, self._dispatcher.limits())

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """The text of token ids. Raises TandemError."""
        with self._observed("Detokenize", context):
            return await detokenize_call(request, self._model, self._dispatcher.limits())

    async def _serve(self, method: str, context: Context, preparing: Awaitable[_Call]) -> Responses:
        with self._observed(method, context) as (record, span):
            call = await preparing
            # Current only while the dispatcher picks it up: a generator may be closed in another task's context.
            with trace.use_span(span):
                answer = await open_answer(self._dispatcher, self._model.tokenizer, [call.prepared], record)
            try:
                async with aclosing(self._responses(call, answer)) as responses:
                    async for response in responses:
                        yield response
            finally:
                await answer.aclose()

    async def _responses(self, call: _Call, answer: Answer) -> Responses:
        id_ = call.prepared.generation.request_id
        scores = call.prepared.generation.params.prompt_logprobs
        async with aclosing(answer.__aiter__()) as deltas:
            async for choice, delta in deltas:
                if scores is not None:
                    for prompt in prompt_to_proto(self._model.tokenizer, delta.prompt_logprobs, scores):
                        yield inference_pb2.GenerateResponse(request_id=id_, prompt=prompt)
                    scores = None
                yield inference_pb2.GenerateResponse(request_id=id_, delta=call.write(choice, delta))
        summary = summary_to_proto(answer.usage, answer.stats)
        yield inference_pb2.GenerateResponse(request_id=id_, summary=summary)

    async def _prepare_generate(self, request: inference_pb2.GenerateRequest, context: Context) -> _Call:
        self._model.check_name(request.model)
        options = await self._options(request.options, context)
        limits = self._dispatcher.limits()
        field = request.WhichOneof("prompt")
        if field is None:
            raise InvalidRequest("one of text and token_ids must be set", field="prompt")
        if field == "text":
            ids = await text_ids(self._model, request.text, limits, field="text")
        else:
            ids = list(request.token_ids.ids)
            check_prompt(ids, limits, field="token_ids")
        prepared = prepare(_new_id(), ids, options, self._model.defaults, limits, prompt_field=field)
        return _Call(prepared, lambda _, delta: delta_to_proto(self._model.tokenizer, delta))

    async def _prepare_chat(self, request: inference_pb2.ChatRequest, context: Context) -> _Call:
        self._model.check_name(request.model)
        options = await self._options(request.options, context)
        limits = self._dispatcher.limits()
        chat = await prepare_chat(
            self._model, chat_from_proto(request), options, limits, request_id=_new_id(), fields=CHAT_FIELDS
        )
        answer = ChatAnswer(chat.new_parser)
        return _Call(
            chat.prepared,
            lambda choice, delta: chat_delta_to_proto(self._model.tokenizer, answer.read(choice, delta)),
        )

    async def _options(self, message: inference_pb2.GenerationOptions, context: Context) -> GenerationOptions:
        """Checked before any work on the prompt, the grammar in a thread: a hostile one takes seconds."""
        options = options_from_proto(message, seconds_left(context.time_remaining()))
        check_options(options, self._dispatcher.limits().vocab_size)
        if message.structured_output.WhichOneof("constraint") is None:
            return options
        return replace(options, grammar=await asyncio.to_thread(grammar_from_proto, message.structured_output))

    @contextmanager
    def _observed(self, method: str, context: Context) -> Iterator[tuple[RequestRecord, Span]]:
        """Server span, metrics and log line of one call; the status is known by how the block is left."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        tenant = tenant_of(self._keys, context.invocation_metadata())
        id_ = request_id(metadata.get("x-request-id", ""))
        record = RequestRecord(self._metrics, id_, f"{_SERVICE}/{method}", tenant)
        span = self._tracer.start_span(
            record.route,
            context=context_from(metadata.get("traceparent", "")),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "tandem.client_request_id": record.request_id},
        )
        status = "INTERNAL"
        try:
            yield record, span
            status = "OK"
        except TandemError as error:
            status = error.status
            raise
        except Exception:
            raise
        except BaseException:  # the call was cancelled, or its generator closed
            status = "CANCELLED"
            raise
        finally:
            record.finish(status)
            span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[status].value[0])
            if status == "INTERNAL":
                span.set_status(StatusCode.ERROR)
            span.end()


def _new_id() -> str:
    return f"gen-{uuid.uuid4().hex}"
