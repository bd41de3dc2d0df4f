"""Servicers on real gRPC servers, and what tests of streams need."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from common.pb.tandem.v1.worker_pb2 import Manifest
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer

PATIENCE = 10.0
EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # absent from the stubs


def make_manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "wire_version_min": 1,
        "wire_version_max": 1,
        "model": "tiny",
        "weights_fingerprint": "w",
        "tokenizer_fingerprint": "t",
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "kv_dtype": "float32",
        "vocab_size": 24,
        "max_model_len": 128,
    }
    return Manifest(**(values | changes))


@contextlib.asynccontextmanager
async def serving(add: Callable[[grpc.aio.Server], None], port: int = 0) -> AsyncIterator[str]:
    """A server with what `add` registers on it; yields its address."""
    server = RpcServer()
    add(server.grpc)
    try:
        bound = await server.start("127.0.0.1", port, ())
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; fails after PATIENCE seconds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # conditions of others' state; nobody sets an event for them
            await asyncio.sleep(0.005)


class Posts:
    """What a servicer hands to its engine."""

    def __init__(self) -> None:
        self.all: list[object] = []

    def __call__(self, command: object) -> None:
        self.all.append(command)

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.all if isinstance(command, kind)]

    async def wait_for(self, kind: type, count: int = 1) -> list[Any]:
        await eventually(lambda: len(self.of(kind)) >= count)
        return self.of(kind)


class Duplex:
    """A client's bidirectional stream: messages are sent by hand and read by hand."""

    def __init__(self, address: str, method: Callable[[grpc.aio.Channel], Any]) -> None:
        self._channel = open_channel(address)
        self._call = method(self._channel)

    async def __aenter__(self) -> "Duplex":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close(None)

    async def send(self, message: Any) -> None:
        await self._call.write(message)

    async def read(self) -> Any:
        """The next message; EOF at the end. Raises AioRpcError if the stream has failed."""
        async with asyncio.timeout(PATIENCE):
            return await self._call.read()

    async def half_close(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()

    async def failure(self) -> grpc.aio.AioRpcError:
        """The error with which the stream ends now."""
        try:
            found = await self.read()
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"no failure, but {found}")

    async def metadata(self) -> dict[str, str]:
        return {key: str(value) for key, value in await self._call.trailing_metadata()}
