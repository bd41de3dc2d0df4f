"""What a running system says of itself: `tandem status`, /metrics of every process, the admin RPC."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.pb.tandem.v1 import worker_pb2 as pb
from tests.e2e.asking import generate
from tests.e2e.cluster import PATIENCE, Cluster, eventually
from tests.factories.http import NO_TLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = list(range(3, 203))
ROLES = {"prefill-0": "prefill", "decode-0": "decode"}

#: Metric families that dashboards and bench lean on, with the labels of their samples.
GATEWAY_FAMILIES: dict[str, set[str]] = {
    "tandem_gateway_requests": {"route", "status"},
    "tandem_gateway_requests_running": {"route"},
    "tandem_gateway_time_to_first_token_seconds": {"route", "le"},
    "tandem_gateway_inter_token_seconds": {"route", "le"},
    "tandem_gateway_request_seconds": {"route", "le"},
    "tandem_gateway_prompt_tokens": set(),
    "tandem_gateway_cached_prompt_tokens": set(),
    "tandem_gateway_output_tokens": set(),
    "tandem_gateway_queue_waiting": set(),
    "tandem_gateway_queue_shared": set(),
    "tandem_gateway_workers": {"role", "state"},
    "tandem_gateway_wanted_workers": {"role"},
    "tandem_gateway_wanted_ratio": set(),
    "tandem_gateway_transfer_bytes": set(),
    "tandem_gateway_transfer_seconds": set(),
    "tandem_gateway_transfer_exposed_seconds": set(),
}
WORKER_FAMILIES: dict[str, set[str]] = {
    "running_requests": set(),
    "waiting_requests": set(),
    "queued_tokens": set(),
    "transfers": set(),
    "kv_blocks": {"state"},
    "staging_slots": {"state"},
    "requests_accepted": set(),
    "requests_finished": set(),
    "requests_cancelled": set(),
    "requests_failed": set(),
    "preemptions": set(),
    "dropped_messages": set(),
    "paired_peers": set(),
}


@pytest.fixture(scope="module")
def used(served: Cluster) -> Cluster:
    """The cluster after a prompt that was prefilled remotely; speeds are measured, something was transferred."""
    for number in range(2):
        answer = generate(served.grpc_target, PROMPT, max_tokens=16, temperature=0.0, cache_salt=f"status {number}")
        assert answer.was_transferred
    served.wait_idle()
    eventually(lambda: served.gateway_status()["ratio"]["ratio"] is not None, what="a wanted ratio")
    return served


def tandem_status(cluster: Cluster, *options: str) -> str:
    command = [str(Path(sys.executable).with_name("tandem")), "status", "--url", cluster.url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def families(text: str) -> dict[str, set[str]]:
    """Family names to the labels of their samples."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        found[family.name] = {label for sample in family.samples for label in sample.labels}
    return found


def test_status_as_json(used: Cluster) -> None:
    status: dict[str, Any] = json.loads(tandem_status(used, "--json"))
    assert {"workers", "queue", "ratio"} <= status.keys()
    workers = {worker["id"]: worker for worker in status["workers"]}
    assert {id_: worker["role"] for id_, worker in workers.items()} == ROLES
    for id_, worker in workers.items():
        process = used.members[id_].process
        assert process is not None and worker["pid"] == process.pid
        assert (worker["state"], worker["addresses"]["grpc"]) == ("ready", used.members[id_].address)
        assert worker["incarnation"] == used.status(id_).incarnation
        blocks = worker["blocks"]
        assert blocks["free"] + blocks["cached"] + blocks["owned"] == blocks["total"] > 0
        assert isinstance(worker["running"], int) and isinstance(worker["waiting"], int)
    assert (status["queue"]["waiting"], status["queue"]["backend"]) == (0, "redis")
    assert status["ratio"]["wanted_prefill"] >= 1 and status["ratio"]["wanted_decode"] >= 1
    assert status["ratio"]["ratio"] > 0


def test_status_for_people(used: Cluster) -> None:
    shown = tandem_status(used)
    assert all(id_ in shown for id_ in ROLES)
    assert "ratio: " in shown and "queue: " in shown


def test_status_of_nobody_is_one_line() -> None:
    command = [str(Path(sys.executable).with_name("tandem")), "status", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1 and "127.0.0.1:9" in done.stderr


def test_metrics_of_the_gateway(used: Cluster) -> None:
    text = used.metrics("gateway")
    found = families(text)
    assert {name: found.get(name) for name in GATEWAY_FAMILIES} == GATEWAY_FAMILIES
    wanted = {
        sample.labels["role"]: sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "tandem_gateway_wanted_workers"
        for sample in family.samples
    }
    assert wanted.keys() == {"prefill", "decode"} and min(wanted.values()) >= 1


@pytest.mark.parametrize(("name", "role"), ROLES.items())
def test_metrics_of_workers(used: Cluster, name: str, role: str) -> None:
    text = used.metrics(name)
    found = families(text)
    wanted = {f"tandem_{role}_{family}": labels for family, labels in WORKER_FAMILIES.items()}
    assert {family: found.get(family) for family in wanted} == wanted
    blocks = {
        sample.labels["state"]: sample.value
        for family in text_string_to_metric_families(text)
        if family.name == f"tandem_{role}_kv_blocks"
        for sample in family.samples
    }
    assert blocks["owned"] == 0 and sum(blocks.values()) == used.status(name).blocks.total


def test_admin_rpc(used: Cluster) -> None:
    prefill, decode = used.status("prefill-0"), used.status("decode-0")
    assert (prefill.role, decode.role) == (pb.ROLE_PREFILL, pb.ROLE_DECODE)
    assert list(decode.paired) == ["prefill-0"] and list(prefill.paired) == ["decode-0"]
    assert prefill.incarnation != decode.incarnation
    for status in (prefill, decode):
        assert status.state == pb.WORKER_STATE_READY
        staging = status.staging
        assert staging.free + staging.granted + staging.quarantined == staging.total
        assert (staging.quarantined, status.dropped_messages, status.failed_total) == (0, 0, 0)
        assert status.accepted_total == status.finished_total + status.cancelled_total
    assert prefill.prefill_tokens_per_second > 0 and decode.decode_tokens_per_second > 0


def test_probes(used: Cluster) -> None:
    for path in ("/health", "/ready"):
        assert (
            httpx.get(used.url + path, trust_env=False, verify=NO_TLS, timeout=PATIENCE).status_code == httpx.codes.OK
        )
