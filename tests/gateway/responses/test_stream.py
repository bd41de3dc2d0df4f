"""The stream of a response on the wire: events, how it ends, failures, and clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from common.errors import NoWorker, RateLimited
from common.sampling import FinishReason
from gateway.generation import GenerationRequest
from gateway.http.responses.memory_store import MemoryStore
from gateway.serving import ServingModel
from tests.factories.http import NO_TLS
from tests.gateway.edges import Edge, running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, Script, answers, deltas

URL = "/v1/responses"


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


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event has a line with its type and one with its data, numbered from 0."""
    assert response.headers["content-type"].startswith("text/event-stream")
    text = response.content.decode("utf-8", errors="strict")
    assert text.endswith("\n\n") and "[DONE]" not in text
    found = []
    for number, block in enumerate(text[:-2].split("\n\n")):
        name, data = block.split("\n")
        body: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        assert body["sequence_number"] == number
        found.append(body)
    return found


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - metrics have no events
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("per_delta", [1, 3, 50])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_stream_and_whole_say_the_same(model: ServingModel, per_delta: int, logprobs: int | None) -> None:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "naïve 😀", per_delta=per_delta), cached_tokens=2)
    body: dict[str, Any] = {"input": "hi", "seed": 1}
    if logprobs is not None:
        body |= {"top_logprobs": logprobs, "include": ["message.output_text.logprobs"]}
    async with serving(model, dispatcher) as (_, client):
        whole = (await client.post(URL, json=body)).json()
        streamed = events(await client.post(URL, json=body | {"stream": True}))
    last = streamed[-1]
    assert last["type"] == "response.completed"
    assert without_names(last["response"]) == without_names(whole)
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert len(entries) == (0 if logprobs is None else whole["usage"]["output_tokens"])
    assert all(len(entry["top_logprobs"]) == logprobs for entry in entries)
    text = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in text) == "naïve 😀"
    assert [entry for event in text for entry in event["logprobs"]] == entries
    for event in streamed[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        assert event["response"]["usage"] is None


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """Ids and times differ from answer to answer."""
    output = [{**item, "id": item["id"][:3]} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "completed_at": 0, "output": output}


async def test_cut_off_by_its_length(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "one two three"))
    async with serving(model, dispatcher) as (_, client):
        streamed = events(await client.post(URL, json={"input": "hi", "max_output_tokens": 2, "stream": True}))
    last = streamed[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["completed_at"] is None
    assert last["response"]["usage"]["output_tokens"] == 2
    assert streamed[-2]["item"]["status"] == "incomplete"


async def test_stop_strings(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "abcXYZdef"))
    async with serving(model, dispatcher) as (_, client):
        streamed = events(await client.post(URL, json={"input": "hi", "stop": ["XYZ"], "stream": True}))
    assert streamed[-1]["type"] == "response.completed"
    assert streamed[-1]["response"]["output"][0]["content"][0]["text"] == "abc"


async def test_an_answer_of_nothing_is_an_empty_message(model: ServingModel) -> None:
    async with serving(model, FakeDispatcher(answers(model.tokenizer, ""))) as (_, client):
        whole = (await client.post(URL, json={"input": "hi"})).json()
        streamed = events(await client.post(URL, json={"input": "hi", "stream": True}))
    for response in (whole, streamed[-1]["response"]):
        (message,) = response["output"]
        assert message["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoWorker("every worker is gone"), 503, "server_error"),
        (RateLimited("too much"), 429, "rate_limit_exceeded"),
        (RuntimeError("secret"), 500, "server_error"),
    ],
)
async def test_failure_in_mid_stream(model: ServingModel, error: Exception, status: int, code: str) -> None:
    ids = model.tokenizer.encode("one")
    dispatcher = FakeDispatcher(lambda request: [*deltas(ids, finish=None), error])
    async with serving(model, dispatcher) as (edge, client):
        streamed = events(await client.post(URL, json={"input": "hi", "stream": True}))
        plain = await client.post(URL, json={"input": "hi"})
        assert plain.status_code == status
        told, failed = streamed[-2:]
        assert told["type"] == "error"
        told_plain = plain.json()["error"]
        assert [told[key] for key in ("message", "code", "param")] == [
            told_plain[key] for key in ("message", "code", "param")
        ]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": code, "message": told["message"]}
        assert "secret" not in json.dumps(streamed)
        await eventually(lambda: edge.sample("tandem_gateway_requests_total", route=URL, status=str(status)) == 2.0)
    assert dispatcher.all_closed


async def test_the_client_is_told_of_a_failure(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(lambda request: [*deltas([70, 71], finish=None), NoWorker("gone")])
    async with (
        running_http(model, dispatcher) as edge,
        openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="tiny", input="hi") as stream,
    ):
        kinds = [event.type async for event in stream]
    assert kinds[-2:] == ["error", "response.failed"]


async def test_what_is_refused_before_it_begins_is_no_stream(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "x"))
    dispatcher.refusal = lambda request: NoWorker("none")
    async with serving(model, dispatcher) as (_, client):
        response = await client.post(URL, json={"input": "hi", "stream": True})
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"


def endless(request: GenerationRequest) -> Script:
    """Two tokens, then nothing for ever."""
    return [*deltas([70, 71], finish=None), asyncio.Event()]


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_frees_everything_and_stores_nothing(model: ServingModel, stream: bool) -> None:
    dispatcher, store = FakeDispatcher(endless), MemoryStore()
    async with serving(model, dispatcher, responses=store) as (edge, _):
        reader, writer = await asyncio.open_connection(edge.host, edge.port)
        content = json.dumps({"input": "hi", "stream": stream}).encode()
        head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        if stream:
            await reader.readuntil(b"response.output_text.delta")
        await eventually(lambda: dispatcher.generations and dispatcher.generations[0].yielded >= 2)
        writer.close()
        await asyncio.wait_for(dispatcher.generations[0].closed.wait(), 10)
        await eventually(lambda: edge.sample("tandem_gateway_requests_total", route=URL, status="499") == 1.0)
    assert await store.get("default", dispatcher.request.request_id) is None


async def test_routes_are_counted_by_their_pattern(model: ServingModel) -> None:
    async with serving(model, FakeDispatcher(answers(model.tokenizer, "x"))) as (edge, client):
        for number in range(3):
            await client.get(f"{URL}/resp_{number}")
        route = f"{URL}/{{id}}"
        await eventually(lambda: edge.sample("tandem_gateway_requests_total", route=route, status="404") == 3.0)


async def test_length_at_the_first_delta(model: ServingModel) -> None:
    """One delta that both begins and ends the answer."""
    dispatcher = FakeDispatcher(lambda request: deltas([70, 71], per_delta=2, finish=FinishReason.LENGTH))
    async with serving(model, dispatcher) as (_, client):
        streamed = events(await client.post(URL, json={"input": "hi", "stream": True}))
    assert streamed[-1]["type"] == "response.incomplete"
