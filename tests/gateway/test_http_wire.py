"""Every answer has the form of the API: whatever path, method, head or body it answers."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from gateway.accounting import EdgeMetrics
from gateway.http.app import create_app
from gateway.http.services import HttpOptions, HttpServices
from gateway.serving import ServingModel
from tests.factories.http import NO_TLS
from tests.gateway.dispatching import eventually
from tests.gateway.edges import Edge, running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, answers

TEXT = "/v1/completions"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, "fine"))


@pytest.fixture
async def edge(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[Edge]:
    options = HttpOptions(max_body_bytes=20_000, body_timeout=0.3, cors_origins=(ORIGIN,))
    async with running_http(model, dispatcher, options=options) as running:
        yield running


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as client:
        yield client


def check_error(response: httpx.Response) -> None:
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]


def documented(model: ServingModel, dispatcher: FakeDispatcher) -> dict[str, set[str]]:
    """Path -> methods, as the OpenAPI document has them."""
    metrics = EdgeMetrics(CollectorRegistry())
    app = create_app(HttpServices(model, dispatcher, metrics, lambda: (True, "")))
    found = {path: {method.upper() for method in methods} for path, methods in app.openapi()["paths"].items()}
    assert {"/v1/chat/completions", TEXT, "/v1/models", "/v1/models/{name}", "/health", "/metrics"} <= found.keys()
    return found


def methods_of(target: str, paths: dict[str, set[str]]) -> set[str]:
    """Also those of a path with a name in it that the target fits: `/v1/responses/input_tokens` is one of its ids."""
    fitting = [methods for path, methods in paths.items() if re.fullmatch(re.sub(r"{[^}]+}", "[^/]+", path), target)]
    return set().union(*fitting)


async def test_wrong_methods_and_paths(
    client: httpx.AsyncClient, model: ServingModel, dispatcher: FakeDispatcher
) -> None:
    paths = documented(model, dispatcher)
    for path in paths:
        target = path.replace("{", "").replace("}", "")
        methods = methods_of(target, paths)
        for method in METHODS:
            if method in methods:
                continue
            response = await client.request(method, target)
            assert response.status_code == 405, (method, target)
            assert set(response.headers["allow"].replace(",", " ").split()) & methods
            check_error(response)
        for wrong in (f"{target}/nope/nope", target.upper(), f"/{target}"):
            # One route takes names with slashes; and a name may be anything.
            if not wrong.startswith("/v1/models/"):
                response = await client.post(wrong, json={})
                assert response.status_code == 404, wrong
                check_error(response)


async def test_head_is_a_get_without_a_body(
    client: httpx.AsyncClient, model: ServingModel, dispatcher: FakeDispatcher
) -> None:
    paths = documented(model, dispatcher)
    for path in paths:
        target = path.replace("{name}", "tiny").replace("{", "").replace("}", "")
        head, get = await client.head(target), await client.get(target)
        assert (head.status_code, head.content) == (get.status_code, b""), target
        assert (head.status_code == 405) == ("GET" not in methods_of(target, paths))
        if path != "/metrics":
            assert head.headers["content-length"] == get.headers["content-length"]
    # The connection is still in step.
    assert (await client.get("/health")).json() == {"status": "ok"}


REFUSED: list[tuple[int, str, str, dict[str, Any]]] = [
    (400, "POST", TEXT, {"json": {}}),
    (400, "POST", TEXT, {"content": b"\xff", "headers": {"content-type": "application/json"}}),
    (404, "POST", TEXT, {"json": {"prompt": "x", "model": "nope"}}),
    (404, "GET", "/v1/models/nope", {}),
    (404, "GET", "/", {}),
    (404, "GET", "/%ff%00%ed%a0%80", {}),
    (405, "GET", TEXT, {}),
    (413, "POST", TEXT, {"json": {"prompt": "x" * 30_000}}),
    (415, "POST", TEXT, {"content": "{}", "headers": {"content-type": "text/plain"}}),
    (415, "POST", TEXT, {"content": "{}", "headers": {"content-type": "é".encode()}}),
    (500, "POST", TEXT, {"json": {"prompt": "bug"}}),
]
SERVED: list[tuple[int, str, str, dict[str, Any]]] = [
    (200, "GET", "/health", {}),
    (200, "GET", "/ready", {}),
    (200, "GET", "/metrics", {}),
    (200, "HEAD", "/v1/models", {}),
    (200, "POST", TEXT, {"json": {"prompt": "x"}}),
    (200, "POST", TEXT, {"json": {"prompt": "x", "stream": True}}),
    (200, "OPTIONS", TEXT, {"headers": {"access-control-request-method": "POST"}}),
]


@pytest.mark.parametrize(("status", "method", "path", "request_"), [*REFUSED, *SERVED])
async def test_every_answer_has_its_id_and_can_be_read_by_browsers(
    client: httpx.AsyncClient,
    dispatcher: FakeDispatcher,
    status: int,
    method: str,
    path: str,
    request_: dict[str, Any],
) -> None:
    dispatcher.refusal = lambda request: RuntimeError("secret detail") if len(request.prompt_ids) > 1 else None
    headers = {**request_.get("headers", {}), "origin": ORIGIN}
    given = await client.request(method, path, **{**request_, "headers": {**headers, "x-request-id": "mine-1"}})
    own = await client.request(method, path, **{**request_, "headers": headers})
    strange = await client.request(method, path, **{**request_, "headers": {**headers, "x-request-id": "a b\tc"}})
    for response in (given, own, strange):
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] in (ORIGIN, "*")
        if status >= 400:
            check_error(response)
            assert "secret" not in response.text
    assert given.headers["x-request-id"] == "mine-1"
    assert len({response.headers["x-request-id"] for response in (given, own, strange)}) == 3
    assert strange.headers["x-request-id"] != "a b\tc"


async def test_preflight_allows_the_key(client: httpx.AsyncClient) -> None:
    asked = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    response = await client.options(TEXT, headers=asked)
    assert response.status_code == 200
    assert "authorization" in response.headers["access-control-allow-headers"].lower()


async def exchange(edge: Edge, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes as they are; the answer, read until the server closes."""
    reader, writer = await asyncio.open_connection(edge.host, edge.port)
    writer.write(raw)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


@pytest.mark.parametrize(("target", "status"), [("/v1/models", 200), ("/v1/models/nope", 404), (TEXT, 405)])
@pytest.mark.parametrize("offer", ["websocket", "h2c", "nonsense"])
async def test_offers_to_upgrade_are_ignored(edge: Edge, target: str, status: int, offer: str) -> None:
    head = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: {offer}\r\n"
    got, headers, body = await exchange(edge, f"{head}Sec-WebSocket-Version: 13\r\n\r\n".encode())
    assert (got, headers["content-type"]) == (status, "application/json")
    assert headers["x-request-id"]
    assert set(json.loads(body)) == ({"error"} if status >= 400 else {"object", "data"})


BAD_HEADS: list[tuple[bytes, int]] = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nNo colon\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Key: " + b"a" * 200_000 + b"\r\n\r\n", 431),
    (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    (b"\x16\x03\x01\x02\x00\x01\x00", 400),
]


@pytest.mark.parametrize(("raw", "status"), BAD_HEADS)
async def test_a_head_that_is_refused_before_routing(edge: Edge, raw: bytes, status: int) -> None:
    got, headers, body = await exchange(edge, raw)
    assert (got, headers["content-type"], headers["connection"]) == (status, "application/json", "close")
    assert int(headers["content-length"]) == len(body)
    assert headers["x-request-id"]
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert json.loads(body)["error"]["code"] == "invalid_http_request"
    assert len(body) < 300


async def test_a_chunk_that_is_none_ends_the_request(edge: Edge) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    got, _, body = await exchange(edge, head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
    assert got == 400
    assert json.loads(body)["error"]["code"] == "invalid_http_request"
    counted = {"route": TEXT, "status": "499"}
    await eventually(lambda: edge.sample("tandem_gateway_requests_total", **counted) == 1)


async def test_leaving_while_the_body_is_sent_is_no_error_of_the_server(edge: Edge) -> None:
    _, writer = await asyncio.open_connection(edge.host, edge.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{")
    await writer.drain()
    running = {"route": TEXT}
    await eventually(lambda: edge.sample("tandem_gateway_requests_running", **running) == 1)
    writer.close()
    counted = {"route": TEXT, "status": "499"}
    await eventually(lambda: edge.sample("tandem_gateway_requests_total", **counted) == 1)
