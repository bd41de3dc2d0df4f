"""OP-01: ready means that requests are served, in whatever order the processes come."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cases.probes import NOT_SERVING, SERVING, health_of, ready_workers
from tests.cases.replies import error_of
from tests.cases.system import CONTROL, System, wait_for_gateway
from tests.e2e.cluster import PATIENCE, Cluster, Member, eventually
from tests.factories.served_model import WORKER_MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@contextmanager
def loading(cluster: Cluster, name: str) -> Iterator[Member]:
    """A worker that is stuck at its start for as long as the block runs, as if its weights took long to load."""
    member = cluster.add_worker(name)
    with member.frozen():
        yield member


def assert_not_ready(system: System) -> None:
    cluster = system.cluster
    assert system.get("/health").status_code == 200
    not_ready = system.get("/ready")
    assert not_ready.status_code == 503 and error_of(not_ready.json())
    assert system.get("/v1/models").status_code == 200
    assert health_of(cluster.grpc_target) == NOT_SERVING
    refused = system.send(CONTROL)
    assert refused.status == 503 and refused.error["message"], refused
    assert int(refused.headers["Retry-After"]) >= 1
    # Five seconds on an idle machine.
    assert refused.seconds < PATIENCE
    system.assert_twin_agrees(refused)


def test_op_01_ready_means_that_requests_are_served(tiny_model: Path, scratch: Path) -> None:
    """Gateway first, then workers that load for long, one role after the other, Redis last of all."""
    cluster = Cluster(tiny_model, scratch, WORKER_MEMORY)
    system = System(cluster, context=2048)
    try:
        cluster.add_gateway()
        wait_until_it_listens(system)
        assert_not_ready(system)
        cluster.start_valkey()
        # Prefill workers alone serve nobody.
        with loading(cluster, "prefill-0"):
            assert_not_ready(system)
        eventually(lambda: "prefill-0" in ready_workers(cluster), what="prefill-0")
        assert_not_ready(system)
        with loading(cluster, "decode-0"):
            assert_not_ready(system)
        wait_for_gateway(cluster, "gateway")
        # The very first one.
        first = system.send(CONTROL)
        assert first.status == 200, first
        eventually(lambda: health_of(cluster.grpc_target) == SERVING, what="gRPC health")
        cluster.wait_ready()
        # A second one that loads gets nothing.
        with loading(cluster, "decode-1"):
            for _ in range(5):
                assert system.send(CONTROL).text == first.text
            assert "decode-1" not in ready_workers(cluster)
        cluster.wait_ready()
        # Documented: a ready decode worker can also prefill, so it makes the gateway ready alone.
        cluster.members.pop("prefill-0").kill()
        assert system.get("/ready").status_code == 200
        assert system.send(CONTROL).text == first.text
    finally:
        cluster.stop()


def wait_until_it_listens(system: System) -> None:
    def listens() -> bool:
        try:
            return system.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    eventually(listens, what="the gateway listening")
