"""OP-05: what is too large is refused before it is read, what is large arrives, what is slow holds up nobody."""

import json
import socket
from contextlib import ExitStack

import grpc
import pytest

from common.pb.tandem.v1 import inference_pb2
from tests.cases.case_data import as_bytes, post, token_array
from tests.cases.processes import resident_bytes
from tests.cases.replies import error_of
from tests.cases.sockets import call
from tests.cases.system import CONTROL, System
from tests.cases.twin import call_twin, twin_request
from tests.e2e.cluster import LOOPBACK, PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MIB = 2**20
#: Documented: of a body and of a message.
LIMIT = 8 * MIB


def test_op_05_texts_of_every_size(system: System) -> None:
    system = system
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


def test_op_05_bodies_beyond_the_limit_are_not_read(system: System) -> None:
    """The answer comes while most of the body has not been sent."""
    port = int(system.cluster.url.rsplit(":", 1)[1])
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


def test_op_05_a_long_answer_arrives(system: System) -> None:
    """More than the 4 MiB that gRPC allows by default, over both doors."""
    body = {"prompt": token_array(20, seed=6), "n": 8, "max_tokens": 900, "logprobs": 20, "ignore_eos": True}
    variant = post("/v1/completions", {**body, "temperature": 0})
    reply = system.send(variant)
    assert reply.status == 200 and len(reply.raw) > 4 * MIB
    assert reply.usage["completion_tokens"] == 8 * 900
    system.assert_twin_agrees(reply)


def test_op_05_long_headers(system: System) -> None:
    """64 KiB of them: refused in words, or taken; the next request is served."""
    status, _, content = call(system.cluster.url, "POST", "/v1/completions", {"X-Long": "x" * (64 << 10)})
    assert status in (200, 431) or (status == 400 and content), status
    if status != 200:
        assert error_of(json.loads(content))
    metadata = (("x-long", "x" * (64 << 10)),)
    twin = call_twin(system.cluster.grpc_target, twin_request(CONTROL), metadata=metadata)
    assert twin.code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_op_05_slow_bodies_hold_up_nobody(system: System) -> None:
    """That they end by a time-out is judged where the clock can be set (`tests/gateway/test_http_errors.py`)."""
    port = int(system.cluster.url.rsplit(":", 1)[1])
    content = as_bytes({"prompt": "x" * 1000, "max_tokens": 1})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((LOOPBACK, port), timeout=PATIENCE)) for _ in range(50)]
        for connection in slow:
            connection.sendall(head)
        for number in range(3):
            for connection in slow:
                connection.sendall(content[number : number + 1])
            assert system.send(CONTROL).text == system.control_text
        # One of them makes up its mind.
        slow[0].sendall(content[3:])
        assert slow[0].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
