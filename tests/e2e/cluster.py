"""A whole Tandem of real processes for tests: start, kill, restart and question each one alone."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx

from common.pb.tandem.v1 import worker_pb2 as pb
from common.pb.tandem.v1 import worker_pb2_grpc
from deploy.local import child_env
from deploy.spawned import dying_with_me
from deploy.valkey import valkey_spec, valkey_url
from tests.e2e.loopback import get
from tests.e2e.ports import Ports

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
#: Longest wait for anything, on a machine under load; it is needed only when something is wrong.
PATIENCE = 120.0
#: Longest wait for processes that load a model, several at a time.
START_PATIENCE = 200.0


def eventually(look: Callable[[], T], *, seconds: float = PATIENCE, what: str = "") -> T:
    """Look until the answer is true, and return it. Fails with the last answer after `seconds`.

    Other processes can only be asked, so this is the one place of these tests that polls.
    """
    deadline = time.monotonic() + seconds
    while not (answer := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what or 'it'} did not come true within {seconds} s; last answer: {answer!r}")
        threading.Event().wait(0.02)
    return answer


@dataclass
class Member:
    """One process of the cluster; keeps its name and ports over restarts."""

    name: str
    module: str
    options: Mapping[str, str]
    log: Path
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = (sys.executable, "-m", self.module, *(text for pair in self.options.items() for text in pair))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                dying_with_me(command), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=dict(self.env)
            )

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Signal the process and wait for its end; returns its exit code."""
        assert self.process is not None, f"{self.name} does not run"
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Hang the process (SIGSTOP) for as long as the block runs; its sockets stay open."""
        assert self.process is not None, f"{self.name} does not run"
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.options['--port']}"


@dataclass
class Cluster:
    """Valkey, workers and a gateway on loopback. Use `running_cluster`."""

    model: Path
    scratch: Path
    worker_options: Mapping[str, str] = field(default_factory=dict)
    gateway_options: Mapping[str, str] = field(default_factory=dict)
    #: Environment variables of every process beside the test's own.
    env: Mapping[str, str] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    _valkey: subprocess.Popen[bytes] | None = None
    _ports: Ports = field(default_factory=Ports)

    # --- members -----------------------------------------------------------------------------------

    def start_valkey(self) -> None:
        spec = valkey_spec(self.scratch)
        self._valkey = subprocess.Popen(
            dying_with_me(spec.command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually((self.scratch / "valkey.sock").exists, what="Valkey's socket")

    def kill_valkey(self) -> None:
        assert self._valkey is not None
        self._valkey.kill()
        self._valkey.wait(PATIENCE)
        (self.scratch / "valkey.sock").unlink(missing_ok=True)

    @contextlib.contextmanager
    def frozen_valkey(self) -> Iterator[None]:
        """Hang it for as long as the block runs; its socket still takes connections."""
        assert self._valkey is not None
        self._valkey.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._valkey.send_signal(signal.SIGCONT)

    def add_worker(self, name: str, **options: str) -> Member:
        """Start `prefill-…` or `decode-…`; options as `kv_memory="64MiB"`."""
        role = name.split("-")[0]
        own = {f"--{key.replace('_', '-')}": value for key, value in options.items()}
        return self._add(
            name,
            f"{role}_svc",
            {
                "--worker-id": name,
                "--port": str(self._ports.take()),
                "--metrics-port": str(self._ports.take()),
                "--threads": "1",
                "--drain-seconds": "10",
                **self.worker_options,
                **own,
            },
        )

    def add_gateway(self, name: str = "gateway", **options: str) -> Member:
        own = {f"--{key.replace('_', '-')}": value for key, value in options.items()}
        fixed = {
            "--http-port": str(self._ports.take()),
            "--grpc-port": str(self._ports.take()),
            "--worker-wait": "5",
            # Estimates depend on how busy the machine is, and tests must not.
            "--prefill-policy": "remote",
        }
        return self._add(name, "gateway", {**fixed, **self.gateway_options, **own})

    def _add(self, name: str, module: str, options: Mapping[str, str]) -> Member:
        shared = {"--model": str(self.model), "--served-model-name": "test-model", "--redis": valkey_url(self.scratch)}
        # Checksums cost little here and show every byte that went astray.
        env = {**child_env(os.environ), "TANDEM_CHECKSUM": "1", **self.env}
        member = Member(name, module, {**shared, **options}, self.scratch / f"{name}.log", env)
        self.members[name] = member
        member.start()
        return member

    def stop(self) -> None:
        for member in self.members.values():
            if member.alive:
                member.kill()
        if self._valkey is not None and self._valkey.poll() is None:
            self._valkey.kill()
            self._valkey.wait(PATIENCE)
        self._ports.give_back()

    # --- questions ---------------------------------------------------------------------------------

    def url_of(self, gateway: str) -> str:
        return f"http://{LOOPBACK}:{self.members[gateway].options['--http-port']}"

    def grpc_target_of(self, gateway: str) -> str:
        return f"{LOOPBACK}:{self.members[gateway].options['--grpc-port']}"

    def metrics(self, name: str) -> str:
        """What Prometheus gets from a worker or a gateway."""
        member = self.members[name]
        if member.module == "gateway":
            url = self.url_of(name)
        else:
            url = f"http://{LOOPBACK}:{member.options['--metrics-port']}"
        return get(f"{url}/metrics", timeout=PATIENCE).text

    @property
    def url(self) -> str:
        return self.url_of("gateway")

    @property
    def grpc_target(self) -> str:
        return self.grpc_target_of("gateway")

    def gateway_status(self, gateway: str = "gateway") -> dict[str, Any]:
        """What `tandem status --json` shows."""
        url = f"{self.url_of(gateway)}/tandem/status"
        answer: dict[str, Any] = get(url, timeout=PATIENCE).json()
        return answer

    def status(self, name: str) -> pb.WorkerStatus:
        """A worker's own account of itself, by its admin RPC."""
        with grpc.insecure_channel(self.members[name].address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            status: pb.WorkerStatus = stub.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE, wait_for_ready=True)
            return status

    def manifest(self, name: str) -> pb.Manifest:
        """What a worker compares with its peers."""
        with grpc.insecure_channel(self.members[name].address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            manifest: pb.Manifest = stub.GetManifest(pb.GetManifestRequest(), timeout=PATIENCE, wait_for_ready=True)
            return manifest

    @property
    def workers(self) -> list[str]:
        return [name for name, member in self.members.items() if member.module != "gateway" and member.alive]

    def wait_ready(self) -> None:
        """Until the gateway is ready, knows every living worker and all pairs are made."""
        try:
            self._wait_ready()
        except AssertionError as error:
            error.add_note("\n".join(f"--- {name}\n{self._log_tail(name)}" for name in self.members))
            raise

    def _wait_ready(self) -> None:
        prefill = sum(name.startswith("prefill") for name in self.workers)
        eventually(self._gateway_is_ready, seconds=START_PATIENCE, what="the gateway's readiness")
        eventually(lambda: self._known_ready() >= set(self.workers), what=f"{self.workers} in the gateway's status")
        for name in self.workers:
            if name.startswith("decode"):
                eventually(lambda name=name: len(self.status(name).paired) == prefill, what=f"pairs of {name}")
        self._assert_alive()

    def wait_gateways(self) -> None:
        """Until every gateway is ready and knows every living worker."""
        for name, member in self.members.items():
            if member.module == "gateway":
                eventually(
                    lambda name=name: self._known_ready(name) >= set(self.workers),
                    seconds=START_PATIENCE,
                    what=f"all workers in the status of {name}",
                )

    def _gateway_is_ready(self) -> bool:
        self._assert_alive()
        return _answers(f"{self.url}/ready")

    def _known_ready(self, gateway: str = "gateway") -> set[str]:
        try:
            workers = self.gateway_status(gateway)["workers"]
        except httpx.TransportError:
            # It does not listen yet.
            return set()
        return {worker["id"] for worker in workers if worker["state"] == "ready"}

    def _assert_alive(self) -> None:
        dead = [name for name, member in self.members.items() if not member.alive]
        assert not dead, f"{dead} ended"

    def _log_tail(self, name: str) -> str:
        return self.members[name].log.read_text()[-4000:]

    def wait_idle(self, seconds: float = PATIENCE, workers: Sequence[str] | None = None) -> None:
        """Until no worker (of `workers`, if given) holds a block, a transfer or a request; the books must balance."""
        for name in self.workers if workers is None else workers:
            eventually(lambda name=name: _is_idle(self.status(name)), seconds=seconds, what=f"{name} being idle")
            blocks = self.status(name).blocks
            assert blocks.free + blocks.cached == blocks.total, blocks

    def restore(self) -> None:
        """Start whoever is dead again, under the same name and port, and wait until all is whole."""
        for member in self.members.values():
            if not member.alive:
                member.start()
        self.wait_ready()


def _answers(url: str) -> bool:
    try:
        return get(url, timeout=5.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _is_idle(status: pb.WorkerStatus) -> bool:
    return status.blocks.owned == status.running == status.waiting == status.transfers == 0


def _as_keywords(options: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix("--").replace("-", "_"): value for key, value in options.items()}


@contextlib.contextmanager
def running_cluster(
    model: Path,
    scratch: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    worker_options: Mapping[str, str] | None = None,
    gateway_options: Mapping[str, str] | None = None,
    decode_options: Mapping[str, str] | None = None,
    prefill_options: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """A ready cluster; every process is gone afterwards. `scratch` must have a short path (unix socket)."""
    cluster = Cluster(model, scratch, worker_options or {}, gateway_options or {}, env or {})
    try:
        cluster.start_valkey()
        for index in range(prefill):
            cluster.add_worker(f"prefill-{index}", **_as_keywords(prefill_options or {}))
        for index in range(decode):
            cluster.add_worker(f"decode-{index}", **_as_keywords(decode_options or {}))
        cluster.add_gateway()
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()
