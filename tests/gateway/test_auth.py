"""API keys over HTTP and gRPC: who gets in, what is open, and whose a request then is."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from common.config import run_command
from common.errors import ConfigError, Unauthenticated
from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from gateway.__main__ import command as gateway_command
from gateway.http.services import HttpOptions
from gateway.serving import ServingModel
from gateway.tenants import EVERYBODY, ApiKeys, KeyLine, Tenant, read_key_file
from tests.factories.http import NO_TLS
from tests.gateway.edges import Edge, running_grpc, running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, answers

KEY, OTHER = "sk-first-0123456789", "sk-second-0123456789"
KEYS = ApiKeys([KeyLine(KEY, "ada", 3), KeyLine(OTHER, "bob"), KeyLine("sk-ada-too", "ada", 3)])
TEXT = "/v1/completions"
BODY = {"prompt": "x", "cache_salt": "salt-of-ours"}
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, "fine"))


@pytest.fixture
async def edge(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[Edge]:
    options = HttpOptions(cors_origins=(ORIGIN,), max_body_bytes=1000)
    async with running_http(model, dispatcher, options=options, keys=KEYS) as running:
        yield running


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- HTTP ------------------------------------------------------------------------------------------------


WRONG_HEADERS: list[list[tuple[str, str | bytes]]] = [
    [],
    [("authorization", "")],
    [("authorization", "Bearer")],
    [("authorization", KEY)],
    [("authorization", f"Basic {KEY}")],
    [("authorization", f"Bearer {KEY}x")],
    [("authorization", f"Bearer {KEY[:-1]}")],
    [("authorization", f"Bearer {KEY.upper()}")],
    [("authorization", f"Bearer {KEY} {OTHER}")],
    [("authorization", f"Bearer x{KEY}")],
    [("authorization", "Bearer é".encode())],
    [("authorization", b"Bearer " + KEY.encode() + b"\xff")],
    [("authorization", "Bearer x"), ("authorization", f"Bearer {KEY}")],
    [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
    [("api-key", KEY), ("x-api-key", KEY)],
    [("cookie", f"authorization=Bearer {KEY}")],
]
PATHS = [
    "/v1/models",
    "/v1/models/tiny",
    TEXT,
    "/v1/chat/completions",
    "/tandem/status",
    "/docs",
    "/openapi.json",
    "/redoc",
    "/",
    "/no/such/route",
]


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    if response.request.method != "HEAD":
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("authentication_error", None, "invalid_api_key")
        assert "sk-" not in response.text


@pytest.mark.parametrize("headers", WRONG_HEADERS)
async def test_wrong_keys(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, headers: list[tuple[str, str | bytes]]
) -> None:
    raw = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in headers]
    check_refused(await client.post(TEXT, json=BODY, headers=raw))
    assert dispatcher.requests == []


async def test_every_path_and_method_needs_the_key(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    """Whether there is such a route is not told either."""
    for path, method in itertools.product(PATHS, ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")):
        check_refused(await client.request(method, path))
    assert dispatcher.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/V1/models",
        "/v1//models",
        "/v1/models/",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/./v1/models",
        "/%76%31/models",
        "/v1/models?x=/health",
        "/v1/models%3F/health",
        "/v1/models#/health",
        "/health/",
        "/HEALTH",
        "//health",
        "/health%00",
        "/health%2F",
        "/metrics/",
        "/health;/v1/models",
        "http://x/health",
        "*",
    ],
)
async def test_no_spelling_of_a_path_comes_around_the_key(edge: Edge, path: str) -> None:
    for method in ("GET", "HEAD", "OPTIONS"):
        reader, writer = await asyncio.open_connection(edge.host, edge.port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            status = await reader.readline()
        writer.close()
        assert status.split()[1] == b"401", (method, path)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer   "])
@pytest.mark.parametrize("key", [KEY, OTHER])
async def test_right_keys(client: httpx.AsyncClient, scheme: str, key: str) -> None:
    headers = {"authorization": f"{scheme} {key}"}
    assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert (await client.post(TEXT, json=BODY, headers=headers)).status_code == 200
    assert (await client.get("/nope", headers=headers)).status_code == 404
    assert (await client.get("/openapi.json", headers=headers)).status_code == 200


async def test_probes_and_metrics_are_open(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/metrics"):
        for headers in ({}, bearer("wrong"), bearer(KEY)):
            assert (await client.get(path, headers=headers)).status_code == 200
            assert (await client.head(path, headers=headers)).status_code == 200


async def test_official_client(edge: Edge) -> None:
    url = f"{edge.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "fine"
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
        assert caught.value.code == "invalid_api_key"


async def test_refused_before_the_body_is_there(edge: Edge) -> None:
    reader, writer = await asyncio.open_connection(edge.host, edge.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
    async with asyncio.timeout(10):
        assert b" 401 " in await reader.readline()
    writer.close()


async def test_browsers(client: httpx.AsyncClient) -> None:
    """A preflight cannot have a key; what it allows is asked for again, and a refusal can be read."""
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for path in (TEXT, "/v1/models", "/nope"):
        response = await client.options(path, headers={"origin": ORIGIN, **preflight})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
        refused = await client.post(path, json=BODY, headers={"origin": ORIGIN})
        check_refused(refused)
        assert refused.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()
    stream = await client.post(TEXT, json={**BODY, "stream": True}, headers={"origin": ORIGIN, **bearer(KEY)})
    assert (stream.status_code, stream.headers["access-control-allow-origin"]) == (200, ORIGIN)


async def test_requests_belong_to_the_keys_tenant(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    for key in (KEY, OTHER, "sk-ada-too"):
        for body in (BODY, {"prompt": ["x", "y"]}):
            assert (await client.post(TEXT, json=body, headers=bearer(key))).status_code == 200
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    await client.post("/v1/chat/completions", json=chat, headers=bearer(OTHER))
    assert [request.tenant for request in dispatcher.requests] == ["ada"] * 3 + ["bob"] * 3 + ["ada"] * 3 + ["bob"]
    # The same salt of another tenant is another one; none is one too.
    assert len({request.cache_salt for request in dispatcher.requests}) == 4
    assert not any("salt-of" in request.cache_salt or not request.cache_salt for request in dispatcher.requests)


async def test_without_keys_all_is_open_and_nobodys(model: ServingModel, dispatcher: FakeDispatcher) -> None:
    async with running_http(model, dispatcher) as edge, httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as client:
        for headers in ({}, bearer("anything")):
            assert (await client.post(TEXT, json=BODY, headers=headers)).status_code == 200
    assert {(request.tenant, request.cache_salt) for request in dispatcher.requests} == {("default", "salt-of-ours")}


async def test_keys_and_salts_are_told_nobody(
    client: httpx.AsyncClient, edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await client.post(TEXT, json=BODY, headers=bearer(KEY))
    await client.post(TEXT, json=BODY, headers=bearer("sk-wrong"))
    await client.post(TEXT, json={**BODY, "cache_salt": ""}, headers=bearer(KEY))
    metrics = (await client.get("/metrics")).text
    shown = metrics + "".join(repr(vars(record)) for record in caplog.records if record.name.startswith("tandem"))
    assert "'tenant': 'ada'" in shown
    assert "sk-" not in shown
    assert "salt-of" not in shown
    assert edge.sample("tandem_gateway_requests_total", route=TEXT, status="401") == 1


# --- gRPC ------------------------------------------------------------------------------------------------


@pytest.fixture
async def channel(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        running_grpc(model, dispatcher, keys=KEYS) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel


async def reflected(channel: grpc.aio.Channel, metadata: Any) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    _ = [answer async for answer in stub.ServerReflectionInfo(iter([request]), metadata=metadata)]


async def generated(channel: grpc.aio.Channel, metadata: Any) -> None:
    request = inference_pb2.GenerateRequest(
        text="x", options=inference_pb2.GenerationOptions(cache_salt="salt-of-ours", n=1)
    )
    stub = inference_pb2_grpc.InferenceStub(channel)
    _ = [answer async for answer in stub.Generate(request, metadata=metadata)]


async def unknown(channel: grpc.aio.Channel, metadata: Any) -> None:
    await channel.unary_unary("/tandem.v1.Inference/Nope")(b"", metadata=metadata)


Call = Callable[[grpc.aio.Channel, Any], Any]


@pytest.mark.parametrize("call", [generated, reflected, unknown])
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", KEY),),
        (("authorization", "Bearer wrong"),),
        (("authorization", f"Basic {KEY}"),),
        (("authorization", "Bearer x"), ("authorization", f"Bearer {KEY}")),
        (("authorization-bin", f"Bearer {KEY}".encode()),),
        (("x-api-key", KEY),),
    ],
)
async def test_grpc_refuses(
    channel: grpc.aio.Channel, dispatcher: FakeDispatcher, call: Call, metadata: tuple[tuple[str, str | bytes], ...]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert ("tandem-code", "invalid_api_key") in tuple(caught.value.trailing_metadata())
    assert "sk-" not in (caught.value.details() or "")
    assert dispatcher.requests == []


async def test_grpc_lets_in_and_knows_the_tenant(channel: grpc.aio.Channel, dispatcher: FakeDispatcher) -> None:
    for key, scheme in ((KEY, "Bearer"), (OTHER, "bearer")):
        metadata = (("authorization", f"{scheme} {key}"),)
        await generated(channel, metadata)
        await reflected(channel, metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(channel, metadata)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert [request.tenant for request in dispatcher.requests] == ["ada", "bob"]
    assert [request.cache_salt for request in dispatcher.requests] == [
        Tenant("ada", isolated=True).salted("salt-of-ours"),
        Tenant("bob", isolated=True).salted("salt-of-ours"),
    ]


async def test_grpc_health_is_open(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service="tandem.v1.Inference"))
    assert answer.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)


# --- keys and tenants ------------------------------------------------------------------------------------


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text, "utf-8")
    return path


def test_key_file(tmp_path: Path) -> None:
    path = written(tmp_path, f"# ours\n\n  ada:{KEY}:3\nbob:{OTHER}  \nnameless\n")
    keys = ApiKeys.load(["by:option"], path)
    assert [keys.tenant_of(f"Bearer {key}").name for key in (KEY, OTHER)] == ["ada", "bob"]
    assert [keys.weight_of(name) for name in ("ada", "bob", "stranger")] == [3, 1, 1]
    names = {keys.tenant_of(f"Bearer {key}").name for key in ("nameless", "by:option")}
    assert len(names) == 2
    assert all(name.startswith("key-") and "nameless" not in name and "option" not in name for name in names)
    assert "sk-" not in repr(read_key_file(path)) + repr(keys) + repr(vars(keys))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no keys"),
        ("# nothing\n\n", "no keys"),
        ("ada:", "line 1: a key"),
        (":sk-x", "line 1: a tenant"),
        ("ok\nada:sk-x y", "line 2: a key"),
        ("ada:sk-ü", "line 1: a key"),
        ("a da:sk-x", "line 1: a tenant"),
        ("ada:sk-x:0", "line 1: a weight"),
        ("ada:sk-x:1001", "line 1: a weight"),
        ("ada:sk-x:-1", "line 1: a weight"),
        ("ada:sk-x:1.5", "line 1: a weight"),
        ("ada:sk-x:1:2", "line 1: KEY"),
        ("ada:sk-x\nbob:sk-x", "same key"),
        ("ada:sk-x:2\nada:sk-y", "two weights"),
    ],
)
def test_key_files_that_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        ApiKeys.load([], written(tmp_path, text))
    assert "sk-" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.load([], tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ApiKeys.load([], tmp_path / "binary")


@pytest.mark.parametrize("key", ["", " ", "a b", "ü", "x" * 513, "a\n"])
def test_options_that_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="key 2"):
        ApiKeys.load(["good", key])


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["--api-key", "sk-a b"], {}),
        (["--api-key", ""], {}),
        ([], {"TANDEM_API_KEY": "good sk-ü"}),
        (["--api-key-file", "/no/such/file"], {}),
        ([], {"TANDEM_API_KEY_FILE": "/no/such/file"}),
    ],
)
def test_the_command_refuses_before_it_reads_a_model(
    arguments: list[str],
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        run_command(gateway_command, ["--model", "/no/such/model", *arguments])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "--api-key" in error
    assert error.count("\n") == 1
    assert "sk-" not in error


def test_no_keys_means_everybody() -> None:
    keys = ApiKeys.load([])
    assert not keys.required
    for authorization in (None, "", "Bearer x"):
        assert keys.tenant_of(authorization) == EVERYBODY


@given(st.text(max_size=40))
def test_nothing_but_a_key_gets_in(given_: str) -> None:
    with pytest.raises(Unauthenticated):
        KEYS.tenant_of(given_)


NAMES = st.text(st.sampled_from("ab.1"), min_size=1, max_size=4)


@given(NAMES, st.text(max_size=4), NAMES, st.text(max_size=4))
def test_salts_are_equal_only_within_one_tenant(name: str, salt: str, other: str, other_salt: str) -> None:
    first, second = Tenant(name, isolated=True).salted(salt), Tenant(other, isolated=True).salted(other_salt)
    assert (first == second) == ((name, salt) == (other, other_salt))
    # Nor can a caller without isolation write one by hand: salts of callers are combined as well.
    assert Tenant(other, isolated=True).salted(first) != first
