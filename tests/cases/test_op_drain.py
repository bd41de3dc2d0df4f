"""OP-02: who is told to stop finishes what runs, takes nothing new and leaves nothing behind."""

import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from redis import Redis

from common.redis_keys import Keys
from deploy.valkey import valkey_url
from tests.cases.case_data import MODEL, post, token_array
from tests.cases.probes import NOT_SERVING, health_of, ready_workers
from tests.cases.processes import descendants, is_running
from tests.cases.replies import error_of
from tests.cases.streams import RawStream, json_events
from tests.cases.system import CONTROL, System, gateway_beside, seen_through
from tests.e2e.cluster import LOOPBACK, PATIENCE, Cluster, eventually
from tests.e2e.failure_fixtures import GrpcStream, registered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
TOKENS = 150
#: More than any drain lets pass.
ENDLESS = 4000


class EightStreams:
    """Four by HTTP and four by gRPC, each with `TOKENS` tokens to come."""

    def __init__(self, system: System, stack: ExitStack, tokens: int = TOKENS) -> None:
        self._tokens = tokens
        prompts = [token_array(60, seed=900 + number) for number in range(8)]
        body = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        variants = [post("/v1/completions", {**body, "prompt": prompt}) for prompt in prompts[:4]]
        self.http = [stack.enter_context(RawStream(system, variant)) for variant in variants]
        self.grpc = [stack.enter_context(GrpcStream(system.cluster, prompt, tokens)) for prompt in prompts[4:]]
        for stream in self.http:
            stream.read_events(2)
        for call in self.grpc:
            call.read(2)

    def read_on(self, count: int) -> None:
        """Until so many tokens more have come on each."""
        for stream in self.http:
            stream.read_events(stream.received.count(b"data: ") + count)
        for call in self.grpc:
            call.read(call.answer.num_tokens + count)

    def assert_end_well(self) -> None:
        for stream in self.http:
            reply = stream.read_to_end()
            assert reply.finish_reason == "length"
        for call in self.grpc:
            assert call.finish().completion_tokens == self._tokens

    def assert_end_in_errors(self) -> None:
        for stream in self.http:
            reply = stream.read_to_end()
            assert error_of(json_events(reply.raw)[-1])
            assert b"[DONE]" not in reply.raw
        for call in self.grpc:
            assert call.code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED)


def process_of(system: System, name: str) -> subprocess.Popen[bytes]:
    process = system.cluster.members[name].process
    assert process is not None
    return process


def test_op_02_gateway_drains(slow_system: System) -> None:
    system, cluster = slow_system, slow_system.cluster
    begun = system.requests_begun()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        streams = EightStreams(system, stack)
        # Two more that wait: their prompts are long.
        long = [{"prompt": token_array(1200, seed=n), "max_tokens": 2} for n in range(2)]
        queued = [pool.submit(system.send, post("/v1/completions", body)) for body in long]
        eventually(lambda: system.requests_begun() == begun + 10, what="ten requests")
        process_of(system, "gateway").send_signal(signal.SIGINT)
        assert_drains(system)
        for _ in range(3):
            refused = system.send(CONTROL)
            assert refused.status == 503 and int(refused.headers["Retry-After"]) >= 1
            system.assert_twin_agrees(refused)
        streams.assert_end_well()
        # Accepted is accepted; who had no place yet may be refused, but hears of it.
        assert all(future.result().status in (200, 503) for future in queued)
    assert process_of(system, "gateway").wait(PATIENCE) == 0
    assert_nothing_left(system, "gateway")
    assert gateways_with_a_lease(cluster) == 0


def assert_drains(system: System) -> None:
    """Readiness goes away by both doors, liveness does not."""
    eventually(lambda: system.get("/ready").status_code == 503, what="readiness going away")
    eventually(lambda: health_of(system.cluster.grpc_target) == NOT_SERVING, what="gRPC health going away")


def assert_nothing_left(system: System, name: str) -> None:
    """No process of its group, no port."""
    process = process_of(system, name)
    options = system.cluster.members[name].options
    for option in ("--port", "--metrics-port", "--http-port", "--grpc-port"):
        if option in options:
            with socket.socket() as probe:
                assert probe.connect_ex((LOOPBACK, int(options[option]))) != 0, option
    assert not {pid for pid in descendants([process.pid]) if is_running(pid)}


def gateways_with_a_lease(cluster: Cluster) -> int:
    with Redis.from_url(valkey_url(cluster.scratch)) as redis:
        return int(redis.zcard(Keys(MODEL).gateways))


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_op_02_workers_drain(slow_system: System, worker: str) -> None:
    system, cluster = slow_system, slow_system.cluster
    with ExitStack() as stack:
        streams = EightStreams(system, stack)
        process_of(system, worker).send_signal(signal.SIGTERM)
        eventually(lambda: worker not in ready_workers(cluster), what=f"{worker} being gone or draining")
        reply = system.send(CONTROL)
        if worker == "decode-0":
            # There is no other.
            assert reply.status == 503 and int(reply.headers["Retry-After"]) >= 1
            assert system.get("/ready").status_code == 503
        else:
            assert reply.text == system.control_text
        streams.assert_end_well()
    assert process_of(system, worker).wait(PATIENCE) == 0
    assert_nothing_left(system, worker)
    assert worker not in registered(cluster)


@pytest.mark.parametrize("name", ["gateway", "decode-0"])
def test_op_02_a_second_signal_ends_it_at_once(slow_system: System, name: str) -> None:
    system = slow_system
    with ExitStack() as stack:
        streams = EightStreams(system, stack, tokens=ENDLESS)
        process = process_of(system, name)
        process.send_signal(signal.SIGTERM)
        if name == "gateway":
            assert_drains(system)
        else:
            eventually(lambda: name not in ready_workers(system.cluster), what="the drain")
        # Nobody is disturbed by the first one.
        streams.read_on(4)
        process.send_signal(signal.SIGTERM)
        streams.assert_end_in_errors()
        assert process.wait(PATIENCE) == 0


def test_op_02_too_little_time(slow_system: System) -> None:
    with gateway_beside(slow_system, "hasty", drain_seconds="0.5") as member, ExitStack() as stack:
        system = seen_through(slow_system, member)
        streams = EightStreams(system, stack, tokens=ENDLESS)
        process_of(system, "gateway").send_signal(signal.SIGTERM)
        streams.assert_end_in_errors()
        assert process_of(system, "gateway").wait(PATIENCE) == 0
        slow_system.cluster.wait_idle()
