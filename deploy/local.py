"""The whole system on one machine: what its processes are and how each is started. Runs nothing itself."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.config import ENV_PREFIX, Address
from deploy.ports import free_port
from deploy.supervisor import ProcessSpec

LOOPBACK = "127.0.0.1"
GATEWAY, DECODE, PREFILL = "gateway", "decode", "prefill"
#: Beyond a service's own drain time: what it takes to leave the registry, close connections and exit.
GRACE_SECONDS = 5.0

# Idle compute threads must soon sleep: on one machine prefill and decode take turns on the same cores. A short spin
# bridges the gap between two kernels of a step; with the default, two workers on two cores all but stop each other.
_THREAD_ENV = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What `tandem up` was asked for, with the model already on disk."""

    model: Path
    model_name: str
    num_prefill: int
    num_decode: int
    http: Address
    grpc: Address
    redis_url: str
    log_level: str
    drain_seconds: float
    #: Options passed to every worker, `--name` to value; and to those that choose where a prompt is computed: decode
    #: workers and the gateway.
    worker_options: Mapping[str, str] = field(default_factory=dict)
    routing_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def grace(self) -> float:
        """Seconds that a service may take to end."""
        return self.drain_seconds + GRACE_SECONDS

    @property
    def http_url(self) -> str:
        """Where this machine reaches the OpenAI API."""
        return f"http://{_reachable(self.http)}"

    @property
    def grpc_target(self) -> str:
        """Where this machine reaches the gRPC API."""
        return str(_reachable(self.grpc))


def _reachable(listening: Address) -> Address:
    everywhere = {"0.0.0.0": LOOPBACK, "::": "::1"}
    return Address(everywhere.get(listening.host, listening.host), listening.port)


def worker_specs(plan: LocalPlan) -> list[ProcessSpec]:
    """The workers, with the ports they keep over restarts."""
    prefill = [_worker_spec(plan, PREFILL, index) for index in range(plan.num_prefill)]
    return prefill + [_worker_spec(plan, DECODE, index) for index in range(plan.num_decode)]


def role_of(name: str) -> str:
    """What a process of this name does: workers are numbered."""
    return name.partition("-")[0]


def _worker_spec(plan: LocalPlan, role: str, index: int) -> ProcessSpec:
    name = f"{role}-{index}"
    port = free_port()
    options = {
        **_common_options(plan),
        "--worker-id": name,
        "--host": LOOPBACK,
        "--port": str(port),
        "--advertise": f"{LOOPBACK}:{port}",
        "--metrics-port": str(free_port()),
        "--threads": str(usable_cores()),
        **plan.worker_options,
        **(plan.routing_options if role == DECODE else {}),
    }
    return ProcessSpec(name, _python(f"{role}_svc", options), _env(plan), plan.grace)


def gateway_spec(plan: LocalPlan) -> ProcessSpec:
    """The gateway; it finds the workers in Redis."""
    options = {
        **_common_options(plan),
        "--http-host": plan.http.host,
        "--http-port": str(plan.http.port),
        "--host": plan.grpc.host,
        "--grpc-port": str(plan.grpc.port),
        **plan.routing_options,
    }
    return ProcessSpec(GATEWAY, _python("gateway", options), _env(plan), plan.grace)


def _env(plan: LocalPlan) -> dict[str, str]:
    """With the URL of Redis: it may hold a password, and arguments are there for all to see."""
    return {**child_env(os.environ), f"{ENV_PREFIX}REDIS": plan.redis_url}


def _common_options(plan: LocalPlan) -> dict[str, str]:
    return {
        "--model": str(plan.model),
        "--served-model-name": plan.model_name,
        "--log-level": plan.log_level,
        "--drain-seconds": str(plan.drain_seconds),
    }


def _python(module: str, options: Mapping[str, str]) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *(text for pair in options.items() for text in pair))


def child_env(parent: Mapping[str, str]) -> dict[str, str]:
    """Environment of a child: the parent's, less what means something else to a service than to `tandem up`.

    (TANDEM_PREFILL is a number of workers for `up` and an address for the gateway.) Everything that `up` decides is
    passed as an argument, which wins over a variable; so options that `up` lacks reach services by TANDEM_ variables.
    """
    env = {name: value for name, value in parent.items() if name not in (f"{ENV_PREFIX}PREFILL", f"{ENV_PREFIX}DECODE")}
    for name, value in _THREAD_ENV.items():
        env.setdefault(name, value)
    if not _special_hardware():
        env.setdefault("UCX_TLS", "tcp,sm,self")
    # Lines must come through the pipe when they are written, not when a buffer is full.
    env["PYTHONUNBUFFERED"] = "1"
    return env


def _special_hardware() -> bool:
    """Whether UCX has more to choose from than loopback: RDMA devices or a GPU. Then its own choice is left alone."""
    return any(Path("/sys/class/infiniband").glob("*")) or Path("/dev/nvidiactl").exists()


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
