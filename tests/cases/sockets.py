"""Requests on a socket of their own, whose path and headers no client tidies up."""

import socket
from collections.abc import Mapping

import httpx

from tests.cases.system import CONTROL
from tests.e2e.cluster import LOOPBACK, PATIENCE


def call(url: str, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, httpx.Headers, bytes]:
    """CONTROL to every path that takes it; returns status, headers and body of the answer."""
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
