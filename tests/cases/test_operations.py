"""OP: starting, stopping, keys, origins, limits and ports of a running system."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis

from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from common.redis_keys import Keys
from deploy.ports import free_port
from deploy.spawned import dying_with_me
from deploy.valkey import valkey_url
from tests.cases.case_data import KEY, MODEL, Case, as_bytes, post, token_array
from tests.cases.processes import descendants, is_running, resident_bytes
from tests.cases.replies import error_of
from tests.cases.streams import RawStream, json_events
from tests.cases.system import CONTROL, System, wait_for_gateway
from tests.cases.twin import call_twin, twin_request
from tests.e2e.cluster import LOOPBACK, PATIENCE, Cluster, Member, eventually, running_cluster
from tests.e2e.failure_fixtures import WORKER_OPTIONS, GrpcStream, registered
from tests.e2e.slow_model import MAX_LENGTH, slow_model
from tests.factories.served_model import WORKER_MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MIB = 2**20
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, trust_env=False, timeout=PATIENCE)


def health_of(target: str) -> int:
    """What the standard gRPC health service says."""
    with grpc.insecure_channel(target) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        return int(answer.status)


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# --- OP-01: readiness ---------------------------------------------------------------------------------


@contextmanager
def loading(cluster: Cluster, name: str) -> Iterator[Member]:
    """A worker that is stuck at its start for as long as the block runs, as if its weights took long to load."""
    member = cluster.add_worker(name)
    with member.frozen():
        yield member


def assert_not_ready(system: System) -> None:
    cluster = system.cluster
    assert get(cluster.url, "/health").status_code == 200
    not_ready = get(cluster.url, "/ready")
    assert not_ready.status_code == 503 and error_of(not_ready.json())
    assert get(cluster.url, "/v1/models").status_code == 200
    assert health_of(cluster.grpc_target) == NOT_SERVING
    refused = system.send(CONTROL)
    assert refused.status == 503 and refused.error["message"], refused
    assert int(refused.headers["Retry-After"]) >= 1
    # Five seconds on an idle machine.
    assert refused.seconds < 30
    system.assert_twin_agrees(refused)


def test_op_01_ready_means_that_requests_are_served(tiny_model: Path, scratch: Path) -> None:
    """Gateway first, then workers that load for long, one role after the other, Redis last of all."""
    cluster = Cluster(tiny_model, scratch, WORKER_MEMORY)
    system = System(cluster, context=2048)
    try:
        cluster.add_gateway()
        wait_until_it_listens(cluster)
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
        assert get(cluster.url, "/ready").status_code == 200
        assert system.send(CONTROL).text == first.text
    finally:
        cluster.stop()


def wait_until_it_listens(cluster: Cluster) -> None:
    def listens() -> bool:
        try:
            return get(cluster.url, "/health").status_code == 200
        except httpx.TransportError:
            return False

    eventually(listens, what="the gateway listening")


def ready_workers(cluster: Cluster) -> set[str]:
    return {worker["id"] for worker in cluster.gateway_status()["workers"] if worker["state"] == "ready"}


# --- OP-02: drain -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_model(tmp_path_factory.mktemp("slow-model")).folder


@pytest.fixture(scope="module")
def patient(slow: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    """Everybody has a minute to finish."""
    minute = {"--drain-seconds": "60"}
    with running_cluster(
        slow, make_scratch(), worker_options={**WORKER_OPTIONS, **minute}, gateway_options=minute
    ) as cluster:
        yield System.fresh(cluster, context=MAX_LENGTH)


@pytest.fixture
def draining(patient: System) -> Iterator[System]:
    patient.cluster.restore()
    yield patient
    patient.cluster.restore()
    patient.note_processes()
    patient.assert_alive()


TOKENS = 250


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_op_02_gateway_drains(draining: System, number: signal.Signals) -> None:
    cluster = draining.cluster
    begun = draining.requests_begun()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        streams = EightStreams(draining, stack)
        # Two more that wait: their prompts are long.
        long = [{"prompt": token_array(2500, seed=n), "max_tokens": 2} for n in range(2)]
        queued = [pool.submit(draining.send, post("/v1/completions", body)) for body in long]
        eventually(lambda: draining.requests_begun() == begun + 10, what="ten requests")
        process_of(draining, "gateway").send_signal(number)
        eventually(lambda: get(cluster.url, "/ready").status_code == 503, what="readiness going away")
        eventually(lambda: health_of(cluster.grpc_target) == NOT_SERVING, what="gRPC health going away")
        for _ in range(3):
            refused = draining.send(CONTROL)
            assert refused.status == 503 and int(refused.headers["Retry-After"]) >= 1
            draining.assert_twin_agrees(refused)
        streams.assert_end_well()
        # Accepted is accepted; who had no place yet may be refused, but hears of it.
        assert all(future.result().status in (200, 503) for future in queued)
    assert process_of(draining, "gateway").wait(PATIENCE) == 0
    assert_nothing_left(draining, "gateway")
    assert gateways_with_a_lease(cluster) == 0


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
def test_op_02_workers_drain(draining: System, worker: str) -> None:
    cluster = draining.cluster
    with ExitStack() as stack:
        streams = EightStreams(draining, stack)
        process_of(draining, worker).send_signal(signal.SIGTERM)
        eventually(lambda: worker not in ready_workers(cluster), what=f"{worker} being gone or draining")
        reply = draining.send(CONTROL)
        if worker == "decode-0":
            # There is no other.
            assert reply.status == 503 and int(reply.headers["Retry-After"]) >= 1
            assert get(cluster.url, "/ready").status_code == 503
        else:
            assert reply.text == draining.control_text
        streams.assert_end_well()
    assert process_of(draining, worker).wait(PATIENCE) == 0
    assert_nothing_left(draining, worker)
    assert worker not in registered(cluster)


@pytest.mark.parametrize("name", ["gateway", "decode-0"])
def test_op_02_a_second_signal_ends_it_at_once(draining: System, name: str) -> None:
    with ExitStack() as stack:
        streams = EightStreams(draining, stack, tokens=2000)
        process = process_of(draining, name)
        process.send_signal(signal.SIGTERM)
        if name == "gateway":
            eventually(lambda: get(draining.cluster.url, "/ready").status_code == 503, what="the drain")
        else:
            eventually(lambda: name not in ready_workers(draining.cluster), what="the drain")
        process.send_signal(signal.SIGTERM)
        streams.assert_end_in_errors()
        assert process.wait(PATIENCE) == 0


def test_op_02_too_little_time(slow: Path, scratch: Path) -> None:
    with running_cluster(
        slow, scratch, worker_options=WORKER_OPTIONS, gateway_options={"--drain-seconds": "1"}
    ) as cluster:
        system = System.fresh(cluster, context=MAX_LENGTH)
        with ExitStack() as stack:
            streams = EightStreams(system, stack, tokens=2000)
            process_of(system, "gateway").send_signal(signal.SIGTERM)
            streams.assert_end_in_errors()
        assert process_of(system, "gateway").wait(PATIENCE) == 0
        cluster.wait_idle()


# --- OP-03: keys --------------------------------------------------------------------------------------


@pytest.fixture
def keyed(system: System) -> Iterator[System]:
    """The shared workers behind a gateway that wants a key and knows one web origin."""
    cluster = system.cluster
    member = cluster.add_gateway("keyed", api_key=KEY, cors_origin=ORIGIN)
    wait_for_gateway(cluster, "keyed")
    view = Cluster(cluster.model, cluster.scratch, members={**cluster.members, "gateway": member})
    yield System(view, system.context, headers={"Authorization": f"Bearer {KEY}"}, control_text=system.control_text)
    member.kill()
    cluster.members.pop("keyed")


ORIGIN = "http://localhost:5173"
#: Documented: for load balancers and Prometheus.
OPEN = {"/health", "/ready", "/metrics"}
WRONG: dict[str, dict[str, str]] = {
    "none": {},
    "wrong": {"Authorization": "Bearer sk-wrong"},
    "basic": {"Authorization": f"Basic {KEY}"},
    "bare": {"Authorization": KEY},
    "longer": {"Authorization": f"Bearer {KEY}x"},
    "other header": {"X-Api-Key": KEY},
}
RIGHT: dict[str, dict[str, str]] = {
    "as documented": {"Authorization": f"Bearer {KEY}"},
    "lower case": {"Authorization": f"bearer {KEY}"},
}


def routes(system: System) -> list[tuple[str, str]]:
    """(method, path) of every route, out of the OpenAPI document, and the ways around it that the case tries."""
    answer = httpx.get(f"{system.cluster.url}/openapi.json", headers=system.headers, trust_env=False, timeout=PATIENCE)
    documented = [
        (method.upper(), path.replace("{name}", MODEL).replace("{response_id}", "resp_1"))
        for path, methods in answer.json()["paths"].items()
        for method in methods
    ]
    assert ("POST", "/v1/chat/completions") in documented
    twisted = ["//v1/chat/completions", "/V1/chat/completions", "/v1/../v1/chat/completions", "/v1/chat/completions/"]
    others = ["/docs", "/redoc", "/openapi.json", "/tandem/status", "/invocations", "/v1/embeddings", "/generate"]
    return [*documented, *(("POST", path) for path in twisted), *(("GET", path) for path in others)]


def call(url: str, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, httpx.Headers, bytes]:
    """On a socket of its own: no client tidies up the path."""
    body = CONTROL.content if method == "POST" and path.endswith("/completions") else b"{}"
    assert body is not None
    lines = [f"{method} {path} HTTP/1.1", "Host: test", "Connection: close", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()] + [f"Content-Length: {len(body)}", "", ""]
    with socket.create_connection((LOOPBACK, int(url.rsplit(":", 1)[1])), timeout=PATIENCE) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, content = received.partition(b"\r\n\r\n")
    status, *given = head.decode().split("\r\n")
    return int(status.split(" ")[1]), httpx.Headers([tuple(line.split(": ", 1)) for line in given]), content


def test_op_03_no_way_around_the_key(keyed: System) -> None:
    for method, path in routes(keyed):
        for name, headers in WRONG.items():
            status, answered, content = call(keyed.cluster.url, method, path, headers)
            if path in OPEN:
                assert status == 200, (method, path, name)
                continue
            assert status == 401, (method, path, name, status)
            assert answered["www-authenticate"].startswith("Bearer")
            assert error_of(json.loads(content))["code"] == "invalid_api_key"
    for query in (f"?api_key={KEY}", f"?key={KEY}"):
        assert call(keyed.cluster.url, "POST", f"/v1/completions{query}", {})[0] == 401
    assert call(keyed.cluster.url, "HEAD", "/v1/models", {})[0] == 401
    for headers in RIGHT.values():
        assert call(keyed.cluster.url, "GET", "/v1/models", headers)[0] == 200
        assert call(keyed.cluster.url, "HEAD", "/v1/models", headers)[0] == 200


def test_op_03_grpc_wants_the_key(keyed: System) -> None:
    request = twin_request(CONTROL)
    target = keyed.cluster.grpc_target
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    for headers in WRONG.values():
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        for message in (request, chat):
            assert call_twin(target, message, metadata=metadata).code is grpc.StatusCode.UNAUTHENTICATED
        with grpc.insecure_channel(target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.Tokenize(inference_pb2.TokenizeRequest(text="secret"), timeout=PATIENCE, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for headers in RIGHT.values():
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        assert call_twin(target, request, metadata=metadata).texts == {0: keyed.control_text}
    # Probes are open.
    assert health_of(target) == SERVING


def test_op_03_the_key_is_shown_nowhere(keyed: System) -> None:
    cluster = keyed.cluster
    assert keyed.send(CONTROL).text == keyed.control_text
    wrong = keyed.send(CONTROL, headers={"Authorization": "Bearer sk-mistyped"})
    shown = [wrong.raw.decode(), cluster.metrics("gateway"), cluster.members["gateway"].log.read_text()]
    assert not any(secret in text for text in shown for secret in (KEY, "sk-mistyped"))


# --- OP-04: web origins -------------------------------------------------------------------------------


def test_op_04_browsers_may_ask(keyed: System, cases: Mapping[str, Case]) -> None:
    plain = System(keyed.cluster, keyed.context)
    replies = plain.run(cases["OP-04"])
    preflight = replies["preflight without key"]
    assert preflight.status in (200, 204)
    assert preflight.headers["Access-Control-Allow-Origin"] in (ORIGIN, "*")
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    allowed = {name.strip() for name in preflight.headers["Access-Control-Allow-Headers"].lower().split(",")}
    assert allowed == {"*"} or {"authorization", "content-type", "x-stainless-lang"} <= allowed
    stream, unauthorized = replies["stream"], replies["401 answer"]
    assert stream.status == 200 and stream.finish_reason
    assert unauthorized.status == 401 and unauthorized.error
    for reply in (stream, unauthorized):
        assert reply.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "Access-Control-Allow-Origin" not in replies["origin not allowed"].headers
    for reply in replies.values():
        assert reply.headers.get("Access-Control-Allow-Credentials") != "true" or (
            reply.headers.get("Access-Control-Allow-Origin") != "*"
        )
    replies.assert_all_judged()


def test_op_04_off_by_default(system: System, cases: Mapping[str, Case]) -> None:
    for reply in system.run(cases["OP-04"]).values():
        assert not [name for name in reply.headers if name.startswith("access-control-")]


# --- OP-05: limits ------------------------------------------------------------------------------------

#: Documented: of a body and of a message.
LIMIT = 8 * MIB


def test_op_05_texts_of_every_size(tiny_system: System) -> None:
    system = tiny_system
    before = system.resident_bytes()["gateway"]
    for prompt in ("word " * MIB, token_array(system.context, seed=5)):
        too_long = system.complete(prompt, max_tokens=1)
        assert too_long.status == 400 and too_long.error["code"] == "context_length_exceeded", too_long
        twin = system.assert_twin_agrees(too_long)
        assert twin is not None
    assert system.complete("x" * (LIMIT + 1), max_tokens=1).status == 413
    huge = call_twin(system.cluster.grpc_target, inference_pb2.GenerateRequest(text="x" * (100 * MIB)))
    assert huge.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert resident_bytes(system.pids["gateway"]) - before < 8 * LIMIT


def test_op_05_bodies_beyond_the_limit_are_not_read(tiny_system: System) -> None:
    """The answer comes while most of the body has not been sent."""
    port = int(tiny_system.cluster.url.rsplit(":", 1)[1])
    head = "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}Content-Length: {100 * MIB}\r\n\r\n".encode() + b"{" * 1000)
        assert_too_large(connection)
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        piece = b"%x\r\n%s\r\n" % (MIB, b"[" * MIB)
        for _ in range(LIMIT // MIB + 1):
            connection.sendall(piece)
        assert_too_large(connection)


def assert_too_large(connection: socket.socket) -> None:
    received = b""
    while b"payload_too_large" not in received:
        piece = connection.recv(1 << 16)
        assert piece, received
        received += piece
    assert received.startswith(b"HTTP/1.1 413 ")


def test_op_05_a_long_answer_arrives(tiny_system: System) -> None:
    """More than the 4 MiB that gRPC allows by default, over both doors."""
    body = {"prompt": token_array(20, seed=6), "n": 8, "max_tokens": 900, "logprobs": 20, "ignore_eos": True}
    variant = post("/v1/completions", {**body, "temperature": 0})
    reply = tiny_system.send(variant)
    assert reply.status == 200 and len(reply.raw) > 4 * MIB
    assert reply.usage["completion_tokens"] == 8 * 900
    tiny_system.assert_twin_agrees(reply)


def test_op_05_long_headers(tiny_system: System) -> None:
    """64 KiB of them: refused in words, or taken; the next request is served."""
    status, _, content = call(tiny_system.cluster.url, "POST", "/v1/completions", {"X-Long": "x" * (64 << 10)})
    assert status in (200, 431) or (status == 400 and content), status
    if status != 200:
        assert error_of(json.loads(content))
    metadata = (("x-long", "x" * (64 << 10)),)
    twin = call_twin(tiny_system.cluster.grpc_target, twin_request(CONTROL), metadata=metadata)
    assert twin.code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_op_05_slow_bodies_hold_up_nobody(tiny_system: System) -> None:
    """That they end by a time-out is judged where the clock can be set (`tests/gateway/test_http_errors.py`)."""
    port = int(tiny_system.cluster.url.rsplit(":", 1)[1])
    content = as_bytes({"prompt": "x" * 1000, "max_tokens": 1})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((LOOPBACK, port), timeout=PATIENCE)) for _ in range(50)]
        for connection in slow:
            connection.sendall(head)
        for number in range(3):
            for connection in slow:
                connection.sendall(content[number : number + 1])
            assert tiny_system.send(CONTROL).text == tiny_system.control_text
        # One of them makes up its mind.
        slow[0].sendall(content[3:])
        assert slow[0].recv(1 << 16).startswith(b"HTTP/1.1 200 ")


# --- OP-06: ports -------------------------------------------------------------------------------------


def start_again(member: Member, **changed: str) -> subprocess.Popen[str]:
    """A second process with the options of `member`, but for those changed."""
    options = {**member.options, **{f"--{name.replace('_', '-')}": value for name, value in changed.items()}}
    command = (sys.executable, "-m", member.module, *(text for pair in options.items() for text in pair))
    return subprocess.Popen(
        dying_with_me(command), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=dict(member.env)
    )


@pytest.mark.parametrize(
    ("name", "taken", "others"),
    [
        ("gateway", "http_port", ["grpc_port"]),
        ("gateway", "grpc_port", ["http_port"]),
        ("prefill-0", "port", ["metrics_port"]),
        ("prefill-0", "metrics_port", ["port"]),
        ("decode-0", "port", ["metrics_port"]),
        ("decode-0", "metrics_port", ["port"]),
    ],
)
def test_op_06_a_port_in_use_is_noticed_before_the_model_loads(
    system: System, name: str, taken: str, others: list[str]
) -> None:
    member = system.cluster.members[name]
    changed = {"worker_id": "second"} if name != "gateway" else {}
    process = start_again(member, **changed, **{other: str(free_port()) for other in others})
    _, complaint = process.communicate(timeout=PATIENCE)
    assert process.returncode not in (0, None)
    port = member.options[f"--{taken.replace('_', '-')}"]
    assert f"{LOOPBACK}:{port}" in complaint, complaint
    assert not re.search(r"model loaded|\bready\b|Traceback", complaint), complaint
    assert "second" not in registered(system.cluster)


def test_op_06_a_port_that_was_just_left_is_free(tiny_system: System) -> None:
    """Connections of the old owner may be in TIME_WAIT."""
    cluster = tiny_system.cluster
    with RawStream(tiny_system, post("/v1/completions", {"prompt": "x", "max_tokens": 500, "stream": True})) as stream:
        stream.read_events(1)
        cluster.members["gateway"].kill()
    for name in ("gateway", "prefill-0", "decode-0"):
        if cluster.members[name].alive:
            cluster.members[name].kill()
        cluster.members[name].start()
    cluster.wait_ready()
    tiny_system.note_processes()


PARENT = """
import subprocess, sys
from deploy.spawned import dying_with_me
child = subprocess.Popen(dying_with_me(tuple(sys.argv[1:])))
print(child.pid, flush=True)
child.wait()
"""


def test_op_06_orphans_end_by_themselves(tiny_system: System) -> None:
    """As `tandem up` starts them: the parent is killed, and the same command can run again at once."""
    member = tiny_system.cluster.members["prefill-0"]
    options = {
        **member.options,
        "--worker-id": "orphan",
        "--port": str(free_port()),
        "--metrics-port": str(free_port()),
    }
    command = (sys.executable, "-m", member.module, *(text for pair in options.items() for text in pair))
    for _ in range(2):
        parent = subprocess.Popen(
            (sys.executable, "-c", PARENT, *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(member.env),
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        eventually(lambda: "orphan" in registered(tiny_system.cluster), what="the worker being ready")
        parent.kill()
        parent.wait(PATIENCE)
        parent.stdout.close()
        eventually(lambda child=child: not is_running(child), seconds=10, what="its end")
        eventually(lambda: "orphan" not in registered(tiny_system.cluster), what="its heartbeat to lapse")
