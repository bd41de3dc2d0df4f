"""Errors of handlers as statuses, over real gRPC."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from common import errors
from common.errors import TandemError
from common.pb.tandem.v1 import decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from common.rpc.channel import open_channel
from common.rpc.status import CODE_KEY, FIELD_KEY, RETRY_AFTER_KEY
from tests.factories.rpc import serving

SECRET = "the user's prompt"


class Failing(worker_pb2_grpc.WorkerServicer, decode_pb2_grpc.DecodeServicer):
    """Every kind of call raises `error`; streams after their first message."""

    error: BaseException = TandemError("")
    closed = 0

    async def GetManifest(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield worker_pb2.WorkerStatus(pid=1)
            raise self.error
        finally:
            self.closed += 1

    async def Submit(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for _ in request_iterator:
                yield decode_pb2.DecodeMessage()
                raise self.error
        finally:
            self.closed += 1


@pytest.fixture
def failing() -> Failing:
    return Failing()


@pytest.fixture
async def channel(failing: Failing) -> AsyncIterator[grpc.aio.Channel]:
    def add(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(failing, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(failing, server)

    async with serving(add) as address, open_channel(address) as opened:
        yield opened


async def fail(channel: grpc.aio.Channel, kind: str) -> tuple[grpc.aio.AioRpcError, int]:
    """Make one call of that kind; returns its error and how many messages came before it."""
    count = 0
    try:
        if kind == "unary":
            await worker_pb2_grpc.WorkerStub(channel).GetManifest(worker_pb2.GetManifestRequest())
        elif kind == "server stream":
            async for _ in worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()):
                count += 1
        else:
            async for _ in decode_pb2_grpc.DecodeStub(channel).Submit(iter([decode_pb2.GatewayMessage()])):
                count += 1
    except grpc.aio.AioRpcError as error:
        return error, count
    raise AssertionError("the call succeeded")


def metadata_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    pairs: Any = error.trailing_metadata()
    return {key: str(value) for key, value in pairs}


TREE = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TandemError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", ["unary", "server stream", "both"])
@pytest.mark.parametrize("error", TREE)
async def test_every_typed_error_has_its_status(
    failing: Failing, channel: grpc.aio.Channel, error: type[TandemError], kind: str
) -> None:
    failing.error = error("what is wrong: ä", field="top_p", retry_after=1.25)
    found, count = await fail(channel, kind)
    assert found.code() is grpc.StatusCode[error.status]
    assert found.details() == "what is wrong: ä"
    metadata = metadata_of(found)
    assert metadata.get(FIELD_KEY) == "top_p"
    assert metadata.get(RETRY_AFTER_KEY) == "1.250"
    assert metadata.get(CODE_KEY) == error.default_code
    assert count == (kind != "unary") == failing.closed


async def test_what_is_not_known_is_not_sent(failing: Failing, channel: grpc.aio.Channel) -> None:
    failing.error = errors.InvalidRequest("bad")
    found, _ = await fail(channel, "unary")
    assert not {FIELD_KEY, CODE_KEY, RETRY_AFTER_KEY} & set(metadata_of(found))


@pytest.mark.parametrize("kind", ["unary", "server stream", "both"])
async def test_an_unexpected_error_is_logged_and_not_told(
    failing: Failing, channel: grpc.aio.Channel, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing.error = RuntimeError(SECRET)
    found, _ = await fail(channel, kind)
    assert (found.code(), found.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert SECRET not in str(found.trailing_metadata())
    assert "unexpected error in /tandem.v1." in caplog.text and SECRET in caplog.text


async def test_a_handler_may_end_its_call_itself(failing: Failing, channel: grpc.aio.Channel) -> None:
    async def answer(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "mine")

    failing.GetManifest = answer  # type: ignore[method-assign]
    # The servicer was registered with the bound method; go through a fresh server.
    async with (
        serving(lambda s: worker_pb2_grpc.add_WorkerServicer_to_server(failing, s)) as address,
        open_channel(address) as own,
    ):
        found, _ = await fail(own, "unary")
    assert (found.code(), found.details()) == (grpc.StatusCode.ALREADY_EXISTS, "mine")


async def test_an_unknown_method_stays_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/tandem.v1.Worker/Unheard", None, None)(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
