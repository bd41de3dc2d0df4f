"""The public gRPC API on the production server: same answers, same refusals, same freedom to leave."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import DeadlineExceeded, NoWorker, Overloaded, RateLimited, TandemError
from common.pb.tandem.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from gateway.accounting import EdgeMetrics
from gateway.generation import GenerationRequest, TokenDelta
from gateway.serving import ServingModel
from tests.gateway.edges import running_grpc, tiny_model
from tests.gateway.fakes import FakeDispatcher, Script, answers, deltas

ANSWER = " Paris, naïve 😀!"
ROUTE = "tandem.v1.Inference/Generate"

#: gRPC counts a call's time with a coarser clock than ours.
CLOCK_SLACK = 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, ANSWER), cached_tokens=2)


Served = tuple[inference_pb2_grpc.InferenceStub, EdgeMetrics]


@pytest.fixture
async def served(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[Served]:
    async with running_grpc(model, dispatcher) as (address, metrics), grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel), metrics
    assert dispatcher.all_closed


def generate(**options: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="one two", options=inference_pb2.GenerationOptions(**options))


def chat(*turns: tuple[str, str], **options: Any) -> inference_pb2.ChatRequest:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return inference_pb2.ChatRequest(messages=messages, options=inference_pb2.GenerationOptions(**options))


async def test_generate(served: Served, dispatcher: FakeDispatcher, model: ServingModel) -> None:
    stub, metrics = served
    responses = [response async for response in stub.Generate(generate(n=2, logprobs=3))]
    assert len({response.request_id for response in responses}) == 1
    *body, last = responses
    expected = [*model.tokenizer.encode(ANSWER), 2]
    for choice in (0, 1):
        parts = [response.delta for response in body if response.delta.choice == choice]
        assert "".join(part.text for part in parts) == ANSWER
        assert [id_ for part in parts for id_ in part.token_ids] == expected
        entries = [entry for part in parts for entry in part.logprobs]
        assert [entry.chosen.token_id for entry in entries] == expected
        assert {len(entry.top) for entry in entries} == {3}
        assert b"".join(entry.chosen.bytes for entry in entries[:-1]).decode() == ANSWER
        assert [part.finish_reason for part in parts][-1] == generation_pb2.FINISH_REASON_STOP
        assert {part.finish_reason for part in parts[:-1]} == {generation_pb2.FINISH_REASON_UNSPECIFIED}
    summary = last.summary
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (
        len(dispatcher.request.prompt_ids),
        2 * len(expected),
        2,
    )
    assert (summary.stats.transfer_bytes, summary.stats.prefill_worker) == (4096, "p0")
    assert metrics.registry.get_sample_value("tandem_gateway_requests_total", {"route": ROUTE, "status": "OK"}) == 1.0


async def test_token_ids_and_chat_mean_the_same_as_over_http(
    served: Served, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    stub, _ = served
    request = inference_pb2.GenerateRequest(model="tiny", token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
    _ = [response async for response in stub.Generate(request)]
    _ = [response async for response in stub.Chat(chat(("developer", "Be brief."), ("user", "hi")))]
    assert dispatcher.requests[0].prompt_ids == (5, 6, 7)
    rendered = model.template.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert list(dispatcher.requests[1].prompt_ids) == model.tokenizer.encode(rendered)


async def test_options_and_deadline_reach_the_dispatcher(served: Served, dispatcher: FakeDispatcher) -> None:
    stub, _ = served
    request = generate(
        temperature=0.0,
        top_k=4,
        seed=-2,
        max_tokens=9,
        min_tokens=1,
        stop=["x"],
        stop_token_ids=[8],
        ignore_eos=True,
        logit_bias={5: 1.5},
        request_class="batch",
        cache_salt="s",
    )
    _ = [response async for response in stub.Generate(request, timeout=30)]
    params = dispatcher.request.params
    assert (params.temperature, params.top_k, params.seed) == (0.0, 4, 2**64 - 2)
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids, params.ignore_eos) == (9, 1, (8,), True)
    assert (dispatcher.request.request_class.value, dispatcher.request.cache_salt) == ("batch", "s")
    assert dispatcher.request.timeout is not None and 0 < dispatcher.request.timeout <= 30 + CLOCK_SLACK


async def refused(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    error = caught.value
    metadata = {key: value for key, value in error.trailing_metadata() if isinstance(value, str)}
    return error.code(), error.details() or "", metadata


MISTAKES: list[tuple[Any, str]] = [
    (generate(temperature=-0.5), "temperature"),
    (generate(temperature=float("nan")), "temperature"),
    (generate(top_p=float("inf")), "top_p"),
    (generate(repetition_penalty=0.0), "repetition_penalty"),
    (generate(n=0), "n"),
    (generate(n=100_000), "n"),
    (generate(max_tokens=0), "max_tokens"),
    (generate(max_tokens=2**31), "max_tokens"),
    (generate(max_tokens=3, min_tokens=4), "min_tokens"),
    (generate(logprobs=100), "logprobs"),
    (generate(logit_bias={-1: 5}), "logit_bias"),
    (generate(logit_bias={401: 5}), "logit_bias"),
    (generate(logit_bias={5: 101}), "logit_bias"),
    (generate(stop=[""]), "stop"),
    (generate(stop_token_ids=[401]), "stop_token_ids"),
    (generate(request_class="urgent"), "request_class"),
    (inference_pb2.GenerateRequest(), "prompt"),
    (inference_pb2.GenerateRequest(text=""), "text"),
    (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[401])), "token_ids"),
    (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 300)), "token_ids"),
    (chat(), "messages"),
    (chat(("wizard", "x")), "messages[0].role"),
    (chat(("user", "hi"), temperature=3.0), "temperature"),
]


async def test_every_mistake_is_named(served: Served, dispatcher: FakeDispatcher) -> None:
    stub, _ = served
    for request, field in MISTAKES:
        method = stub.Chat if isinstance(request, inference_pb2.ChatRequest) else stub.Generate
        code, message, metadata = await refused(method(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, (request, message)
        assert metadata["tandem-field"] == field, request
    assert dispatcher.requests == []


async def test_unknown_model(served: Served) -> None:
    code, message, metadata = await refused(served[0].Generate(inference_pb2.GenerateRequest(model="nope", text="x")))
    assert (code, metadata["tandem-code"]) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
    assert "nope" in message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RateLimited("no", retry_after=2), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Overloaded("no", retry_after=2), grpc.StatusCode.UNAVAILABLE),
        (NoWorker("no"), grpc.StatusCode.UNAVAILABLE),
        (DeadlineExceeded("no"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_dispatcher_errors_by_the_table(
    served: Served, dispatcher: FakeDispatcher, error: TandemError, code: grpc.StatusCode
) -> None:
    dispatcher.refusal = lambda request: error
    stub, metrics = served
    got, message, _ = await refused(stub.Generate(generate()))
    assert (got, message) == (code, "no")
    labels = {"route": ROUTE, "status": code.name}
    assert metrics.registry.get_sample_value("tandem_gateway_requests_total", labels) == 1.0


async def test_bug_is_internal_without_details(served: Served, dispatcher: FakeDispatcher) -> None:
    dispatcher.refusal = lambda request: RuntimeError("secret")
    code, message, _ = await refused(served[0].Generate(generate()))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message


async def test_failure_in_mid_stream_ends_with_its_status(served: Served, dispatcher: FakeDispatcher) -> None:
    dispatcher.script_for = lambda request: [*deltas([70, 71], finish=None), NoWorker("gone")]
    call = served[0].Generate(generate())
    received: list[int] = []

    async def collect() -> None:
        async for response in call:
            received.extend(response.delta.token_ids)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect()
    assert received == [70, 71]
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "gone")


def endless(request: GenerationRequest) -> Script:
    return [*deltas([70, 71], finish=None), asyncio.Event()]


@pytest.mark.parametrize("by", ["cancel", "deadline"])
async def test_leaving_closes_the_generation(served: Served, dispatcher: FakeDispatcher, by: str) -> None:
    dispatcher.script_for = endless
    stub, metrics = served
    call = stub.Generate(generate(), timeout=2.0 if by == "deadline" else None)
    await call.read()
    if by == "cancel":
        call.cancel()
    await asyncio.wait_for(dispatcher.generations[0].closed.wait(), 10)
    labels = {"route": ROUTE, "status": "CANCELLED"}
    async with asyncio.timeout(10):
        while metrics.registry.get_sample_value("tandem_gateway_requests_total", labels) != 1.0:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert metrics.registry.get_sample_value("tandem_gateway_requests_running", {"route": ROUTE}) == 0.0


async def test_leaving_while_queued_cancels_the_submission(served: Served, dispatcher: FakeDispatcher) -> None:
    dispatcher.gate = asyncio.Event()
    call = served[0].Generate(generate())
    reading = asyncio.ensure_future(call.read())
    async with asyncio.timeout(10):
        while not dispatcher.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    call.cancel()
    await asyncio.wait_for(dispatcher.submit_cancelled.wait(), 10)
    await asyncio.gather(reading, return_exceptions=True)


async def test_leaving_while_the_client_does_not_read(model: ServingModel, dispatcher: FakeDispatcher) -> None:
    """The handler is then suspended in writing, not in waiting for tokens."""
    # The second message is larger than what HTTP/2 lets through unread, so that writing it cannot end.
    large = [TokenDelta(0, 0, (70,)), TokenDelta(0, 1, (70,) * 100_000), TokenDelta(0, 100_001, (70,))]
    dispatcher.script_for = lambda request: [*large, asyncio.Event()]
    small_window = [("grpc.http2.bdp_probe", 0)]
    async with (
        running_grpc(model, dispatcher) as (address, _),
        grpc.aio.insecure_channel(address, options=small_window) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate())
        await call.read()
        (generation,) = dispatcher.generations
        async with asyncio.timeout(10):
            while generation.yielded < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.wait_for(generation.closed.wait(), 10)
        assert generation.yielded == 2, "the handler was not in the middle of its second message"


async def test_server_span_continues_the_callers_trace(model: ServingModel, dispatcher: FakeDispatcher) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with (
        running_grpc(model, dispatcher, tracer=provider.get_tracer("test")) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        _ = [response async for response in stub.Generate(generate(), metadata=(("traceparent", traceparent),))]
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert (f"{span.parent.span_id:016x}", span.name) == ("b7ad6b7169203331", ROUTE)
