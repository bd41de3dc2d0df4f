"""Streams that are read as far as a test likes and left in the way it likes."""

import json
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import httpx

from tests.cases.case_data import Variant
from tests.cases.replies import Reply
from tests.cases.system import System
from tests.e2e.cluster import LOOPBACK, PATIENCE

END_OF_HEAD = b"\r\n\r\n"


class RawStream:
    """A POST on a socket of its own; a context manager that hangs up."""

    def __init__(self, system: System, variant: Variant, *, receive_buffer: int | None = None) -> None:
        assert variant.content is not None
        self.variant = variant
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.settimeout(4 * PATIENCE)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.connect((LOOPBACK, int(system.cluster.url.rsplit(":", 1)[1])))
        lines = [f"{variant.method} {variant.path} HTTP/1.1", "Host: test", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in {**system.headers, **variant.headers}.items()]
        lines += [f"Content-Length: {len(variant.content)}", "Connection: close", "", ""]
        self._socket.sendall("\r\n".join(lines).encode() + variant.content)
        self.received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.hang_up()

    def read_events(self, count: int) -> None:
        """Until so many events are there."""
        while self.received.count(b"data: ") < count:
            assert self._receive(), f"the server closed the connection after {self.received[-500:]!r}"

    def read_to_end(self) -> Reply:
        """The whole answer, once the server closes."""
        while self._receive():
            pass
        head, _, body = self.received.partition(END_OF_HEAD)
        status_line, *header_lines = head.decode().split("\r\n")
        headers = httpx.Headers([tuple(line.split(": ", 1)) for line in header_lines])
        if headers.get("transfer-encoding") == "chunked":
            body = _dechunked(body)
        return Reply(self.variant, int(status_line.split(" ")[1]), headers, body, 0.0)

    def hang_up(self, *, reset: bool = False) -> None:
        """Close the connection: with FIN, or with RST."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _receive(self) -> bool:
        piece = self._socket.recv(1 << 16)
        self.received += piece
        return bool(piece)


def _dechunked(body: bytes) -> bytes:
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        content, body = content + body[:length], body[length + 2 :]
        if length == 0:
            return content
    raise AssertionError("the body ends before its last chunk")


@contextmanager
def strangers(system: System, variants: list[Variant]) -> Iterator[list[RawStream]]:
    """Streams of other clients that run for as long as the block; each has begun."""
    streams = [RawStream(system, variant) for variant in variants]
    try:
        for stream in streams:
            stream.read_events(1)
        yield streams
    finally:
        for stream in streams:
            stream.hang_up()


@contextmanager
def meanwhile(calls: list[Callable[[], Reply]]) -> Iterator[list[Future[Reply]]]:
    """Requests that are sent while the block runs; all have been answered behind it."""
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


def json_events(raw: bytes) -> list[Any]:
    """JSON of the events among bytes that may stop anywhere."""
    lines = [line for line in raw.split(b"\n")[:-1] if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]
