"""A stream to a decode worker leaves nothing behind, whoever ends it and when."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from common.pb.tandem.v1 import decode_pb2, decode_pb2_grpc
from gateway.dispatch import connection as connection_module
from gateway.dispatch.connection import Attempt, Broken, DecodeConnections, Unreachable
from tests.gateway.dispatching import eventually

Context = grpc.aio.ServicerContext[Any, Any]
Messages = AsyncIterator[decode_pb2.GatewayMessage]
Script = Callable[[Messages, Context], AsyncIterator[decode_pb2.DecodeMessage]]

HELLO = decode_pb2.DecodeMessage(hello=decode_pb2.DecodeHello(worker_id="w", incarnation="i"))


class Scripted(decode_pb2_grpc.DecodeServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def Submit(self, request_iterator: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
        async for message in self._script(request_iterator, context):
            yield message


@asynccontextmanager
async def served(script: Script) -> AsyncIterator[str]:
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServicer_to_server(Scripted(script), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def refuses_at_once(messages: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not with you")
    yield HELLO  # type: ignore[unreachable]  # makes it a generator


async def refuses_after_reading(messages: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
    await anext(aiter(messages))
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not with you")
    yield HELLO  # type: ignore[unreachable]  # makes it a generator


async def ends_without_a_word(messages: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
    return
    yield HELLO  # type: ignore[unreachable]  # makes it a generator


async def says_something_else(messages: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
    yield decode_pb2.DecodeMessage(step=decode_pb2.Step())
    await asyncio.Event().wait()


async def says_nothing(messages: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
    await asyncio.Event().wait()
    yield HELLO


async def ends_after_hello(messages: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
    yield HELLO


async def fails_after_hello(messages: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
    yield HELLO
    await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")


async def stays(messages: Messages, context: Context) -> AsyncIterator[decode_pb2.DecodeMessage]:
    yield HELLO
    async for _ in messages:
        pass


@pytest.fixture
def only_clean_ends(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails if a task is destroyed pending. (What the interpreter cannot raise, pytest turns into errors.)"""
    yield
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


def pollers() -> list[str]:
    """Tasks of gRPC that wait for our next message."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return [name for c in coroutines if "_consume_request_iterator" in (name := getattr(c, "__qualname__", ""))]


@pytest.mark.usefixtures("only_clean_ends")
@pytest.mark.parametrize(
    "script", [refuses_at_once, refuses_after_reading, ends_without_a_word, says_something_else, says_nothing]
)
async def test_a_stream_that_was_never_opened(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_HELLO_SECONDS", 0.2)
    async with served(script) as address:
        connections = DecodeConnections("gw")
        with pytest.raises(Unreachable):
            await connections.get(address)
        await eventually(lambda: not pollers())
        await connections.close()


@pytest.mark.usefixtures("only_clean_ends")
@pytest.mark.parametrize("script", [ends_after_hello, fails_after_hello])
async def test_a_stream_that_the_worker_ends(script: Script) -> None:
    async with served(script) as address:
        connections = DecodeConnections("gw")
        connection = await connections.get(address)
        attempt = Attempt("r", 0, lambda delta: True, lambda scores: True)
        connection.submit(attempt, decode_pb2.SubmitRequest(request_id="r"))
        assert isinstance(await asyncio.wait_for(attempt.answer, 10), Broken)
        await eventually(lambda: not pollers())
        # Nobody sends it any more, and nobody is hurt.
        connection.cancel(attempt)
        await connections.close()


@pytest.mark.usefixtures("only_clean_ends")
async def test_a_stream_that_the_gateway_ends() -> None:
    async with served(stays) as address:
        connections = DecodeConnections("gw")
        await connections.get(address)
        assert len(pollers()) == 1
        await connections.close()
        await eventually(lambda: not pollers())
