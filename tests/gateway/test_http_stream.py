"""The life of a response: events, errors in mid-stream, clients that leave or do not read, and what is told of it."""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import NoWorker
from common.sampling import FinishReason
from gateway.generation import GenerationRequest, TokenDelta
from gateway.http.services import HttpOptions
from gateway.serving import ServingModel
from tests.factories.http import NO_TLS
from tests.gateway.edges import Edge, running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, Script, answers, deltas

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def serving(
    model: ServingModel, dispatcher: FakeDispatcher, **options: Any
) -> AsyncIterator[tuple[Edge, httpx.AsyncClient]]:
    async with (
        running_http(model, dispatcher, **options) as edge,
        httpx.AsyncClient(base_url=edge.url, verify=NO_TLS, timeout=20) as client,
    ):
        yield edge, client


def events(text: str) -> list[str]:
    """Data of each event; every event is one `data:` line and a blank one."""
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - metrics have no events
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("usage", [None, False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), (TEXT, {"prompt": "x"})])
async def test_event_shape(model: ServingModel, path: str, body: dict[str, Any], usage: bool | None) -> None:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "naïve 😀"))
    extra = {} if usage is None else {"stream_options": {"include_usage": usage}}
    async with serving(model, dispatcher) as (_, client):
        response = await client.post(path, json=body | {"stream": True} | extra)
    assert response.headers["content-type"].startswith("text/event-stream")
    data = events(response.content.decode("utf-8", errors="strict"))
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    chunks = [json.loads(entry) for entry in data[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if path == CHAT else "text_completion"}
    assert all(isinstance(chunk["created"], int) for chunk in chunks)
    assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [usage is True]
    assert all(("usage" in chunk) == (chunk["choices"] == []) for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert all("finish_reason" in choice for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert choices[-1]["delta"] == {}


async def test_continuous_usage(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "one two"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(model, dispatcher) as (_, client):
        response = await client.post(TEXT, json={"prompt": "x", "stream": True, "stream_options": options})
    counts = [json.loads(entry)["usage"]["completion_tokens"] for entry in events(response.text)[:-1]]
    assert counts == sorted(counts)
    assert counts[0] == 1


async def test_no_partial_stop_string_is_ever_sent(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "abcabXabcabcYtail"))
    async with serving(model, dispatcher) as (_, client):
        response = await client.post(TEXT, json={"prompt": "x", "stream": True, "stop": ["abcabcY"]})
    chunks = [json.loads(entry)["choices"][0] for entry in events(response.text)[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == "abcabX"
    assert chunks[-1]["finish_reason"] == "stop"
    assert dispatcher.generations[0].cancelled_choices == {0}


@pytest.mark.parametrize("error", [NoWorker("every worker is gone"), RuntimeError("secret")])
async def test_error_in_mid_stream_is_the_last_event(model: ServingModel, error: Exception) -> None:
    ids = model.tokenizer.encode("one")
    dispatcher = FakeDispatcher(lambda request: [*deltas(ids, finish=None), error])
    async with serving(model, dispatcher) as (edge, client):
        for body in ({"prompt": "x"}, {"prompt": ["x", "y"]}):
            response = await client.post(TEXT, json=body | {"stream": True})
            assert response.status_code == 200
            data = [json.loads(entry) for entry in events(response.text)]
            assert set(data[-1]["error"]) == {"message", "type", "param", "code"}
            assert "secret" not in response.text
            plain = await client.post(TEXT, json=body)
            status = 503 if isinstance(error, NoWorker) else 500
            assert plain.status_code == status
            assert plain.json()["error"] == data[-1]["error"]
        await eventually(lambda: edge.sample("tandem_gateway_requests_total", route=TEXT, status=str(status)) == 4.0)
    assert dispatcher.all_closed


def endless(request: GenerationRequest) -> Script:
    """Two tokens, then nothing for ever."""
    return [*deltas([70, 71], finish=None), asyncio.Event()]


async def raw_request(edge: Edge, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(edge.host, edge.port)
    content = json.dumps(body).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
async def test_disconnect_closes_the_generation(
    model: ServingModel, stream: bool, reset: bool, prompt: str | list[str]
) -> None:
    dispatcher = FakeDispatcher(endless)
    async with serving(model, dispatcher) as (edge, _):
        reader, writer = await raw_request(edge, {"prompt": prompt, "stream": stream})
        if stream:
            await reader.readuntil(b"data: ")
        await eventually(lambda: sum(generation.yielded for generation in dispatcher.generations) >= 2)
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        for generation in dispatcher.generations:
            await asyncio.wait_for(generation.closed.wait(), 10)
        await eventually(lambda: edge.sample("tandem_gateway_requests_total", route=TEXT, status="499") == 1.0)
        assert edge.sample("tandem_gateway_requests_running", route=TEXT) == 0


async def test_disconnect_while_queued_cancels_the_submission(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(endless)
    dispatcher.gate = asyncio.Event()
    async with serving(model, dispatcher) as (edge, _):
        _, writer = await raw_request(edge, {"prompt": "x"})
        await eventually(lambda: dispatcher.requests)
        writer.close()
        await asyncio.wait_for(dispatcher.submit_cancelled.wait(), 10)
        await eventually(lambda: edge.sample("tandem_gateway_requests_running", route=TEXT) == 0)
    assert dispatcher.generations == []


def flood(request: GenerationRequest) -> Script:
    """Far more than sockets hold."""
    ids = [70] * 50
    last = TokenDelta(0, 50 * 4000, (70,), finish_reason=FinishReason.LENGTH)
    return [*(TokenDelta(0, 50 * i, tuple(ids)) for i in range(4000)), last]


async def slow_reader(edge: Edge, *, stream: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (edge.host, edge.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    content = json.dumps({"prompt": "x", "stream": stream}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    writer.write(head + content)
    return reader, writer


async def taken_while_blocked(edge: Edge, dispatcher: FakeDispatcher) -> int:
    """Deltas taken from the generation when the socket is full; fails if more are taken although it stays so."""
    await eventually(lambda: edge.writing_blocked)
    await turns(100)
    taken = dispatcher.generations[0].yielded
    await turns(1000)
    assert edge.writing_blocked
    assert dispatcher.generations[0].yielded == taken
    return taken


async def turns(count: int) -> None:
    """Let everything that can go on go on, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_slow_reader_stops_the_pump_and_still_gets_everything(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(flood)
    async with serving(model, dispatcher, send_buffer=4096) as (edge, client):
        reader, writer = await slow_reader(edge)
        assert await taken_while_blocked(edge, dispatcher) < 4001
        models = await client.get("/v1/models")
        assert models.status_code == 200
        received = bytearray()
        while b"[DONE]" not in received[-64:]:
            received += await reader.read(1 << 16)
        assert received.count(b"data: ") == 4002
        writer.close()
        await eventually(lambda: dispatcher.all_closed)


@pytest.mark.parametrize("stream", [True, False])
async def test_reader_that_never_reads_is_cut(model: ServingModel, stream: bool) -> None:
    dispatcher = FakeDispatcher(flood)
    async with serving(model, dispatcher, options=HttpOptions(write_timeout=0.2), send_buffer=4096) as (edge, _):
        _, writer = await slow_reader(edge, stream=stream)
        await eventually(lambda: dispatcher.generations)
        await asyncio.wait_for(dispatcher.generations[0].closed.wait(), 10)
        assert not stream or dispatcher.generations[0].yielded < 4001
        await eventually(lambda: edge.sample("tandem_gateway_requests_total", route=TEXT, status="499") == 1.0)
        writer.close()


async def test_request_ids_log_and_metrics(model: ServingModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.gateway.requests")
    dispatcher = FakeDispatcher(answers(model.tokenizer, "one two"), cached_tokens=1)
    async with serving(model, dispatcher) as (edge, client):
        given = await client.post(TEXT, json={"prompt": "my secret"}, headers={"X-Request-Id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        forged = await client.post(TEXT, json={"prompt": "x", "n": 0}, headers={"X-Request-Id": "a b\tc"})
        assert forged.headers["x-request-id"] not in ("", "a b\tc")
        unknown = await client.get("/v1/nope/" + "x" * 50)
        assert "x-request-id" in unknown.headers
        scraped = (await client.get("/metrics")).text
    lines = [record for record in caplog.records if record.name == "tandem.gateway.requests"]
    assert [line.status for line in lines] == ["200", "400", "404"]  # type: ignore[attr-defined]
    fields = vars(lines[0])
    prompt_tokens = len(dispatcher.requests[0].prompt_ids)
    assert (fields["request_id"], fields["route"], fields["prompt_tokens"]) == ("abc-1", TEXT, prompt_tokens)
    assert fields["output_tokens"] == given.json()["usage"]["completion_tokens"]
    assert fields["generation"]["transfer_bytes"] == 4096
    assert not any("secret" in str(vars(line)) for line in lines)
    assert f'tandem_gateway_requests_total{{route="{TEXT}",status="200"}} 1.0' in scraped
    assert 'tandem_gateway_requests_total{route="other",status="404"} 1.0' in scraped
    assert edge.sample("tandem_gateway_time_to_first_token_seconds_count", route=TEXT) == 1.0
    output_tokens = given.json()["usage"]["completion_tokens"]
    assert edge.sample("tandem_gateway_inter_token_seconds_count", route=TEXT) == output_tokens - 1
    assert edge.sample("tandem_gateway_output_tokens_total") == output_tokens
    assert edge.sample("tandem_gateway_cached_prompt_tokens_total") == 1.0


async def test_server_span_continues_the_callers_trace(model: ServingModel) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    dispatcher = FakeDispatcher(answers(model.tokenizer, "one"))
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(model, dispatcher, tracer=provider.get_tracer("test")) as (_, client):
        await client.post(TEXT, json={"prompt": "x"}, headers={"traceparent": traceparent})
    (span,) = exporter.get_finished_spans()
    assert span.context is not None and span.parent is not None and span.attributes is not None
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert (span.name, span.attributes["http.response.status_code"]) == (f"POST {TEXT}", 200)


async def test_probes(model: ServingModel) -> None:
    async with serving(model, FakeDispatcher(endless)) as (edge, client):
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).status_code == 200
        edge.readiness = (False, "no decode worker")
        response = await client.get("/ready")
        assert response.status_code == 503
        assert "no decode worker" in response.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200


async def test_cross_origin_is_off_unless_allowed(model: ServingModel) -> None:
    origin = {"Origin": "http://localhost:5173"}
    preflight = origin | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    dispatcher = FakeDispatcher(answers(model.tokenizer, "one"))
    allowed = HttpOptions(cors_origins=("http://localhost:5173",))
    async with serving(model, dispatcher, options=allowed) as (_, client):
        response = await client.options(CHAT, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://localhost:5173"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "authorization" in response.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in response.headers
        for body in ({"prompt": "x", "stream": True}, {"prompt": "x", "n": 0}):
            response = await client.post(TEXT, json=body, headers=origin)
            assert response.headers["access-control-allow-origin"] == "http://localhost:5173"
        evil = await client.options(CHAT, headers=preflight | {"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in evil.headers
    async with serving(model, dispatcher) as (_, client):
        response = await client.post(TEXT, json={"prompt": "x"}, headers=origin)
        assert "access-control-allow-origin" not in response.headers


async def test_openapi_document_describes_the_bodies(model: ServingModel) -> None:
    async with serving(model, FakeDispatcher(endless)) as (_, client):
        document = (await client.get("/openapi.json")).json()
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in schema["properties"]
