"""The server and channel factories."""

import asyncio
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import ConfigError
from common.pb.tandem.v1 import worker_pb2, worker_pb2_grpc
from common.rpc.channel import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, open_blocking_channel, open_channel
from common.rpc.server import SERVER_OPTIONS, RpcServer
from tests.factories.rpc import make_manifest, serving


class Naming(worker_pb2_grpc.WorkerServicer):
    def __init__(self, model: str) -> None:
        self._model = model

    async def GetManifest(self, request: object, context: object) -> worker_pb2.Manifest:
        return make_manifest(model=self._model)


@pytest.mark.parametrize("key", [key for key, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS)])
def test_grpc_knows_the_option(key: str) -> None:
    """It ignores unknown ones in silence, and keepalive then closes connections instead of keeping them."""
    assert key.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()


async def test_health_says_serving_only_when_told() -> None:
    server = RpcServer()
    port = await server.start("127.0.0.1", 0, ["tandem.v1.Worker"])
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            seen = []
            for serving_now in (None, True, False):
                if serving_now is not None:
                    await server.set_serving(serving_now)
                seen.append((await stub.Check(health_pb2.HealthCheckRequest())).status)
            assert seen == [2, 1, 2]
    finally:
        await server.stop(0)


async def test_reflection_lists_the_services() -> None:
    server = RpcServer()
    port = await server.start("127.0.0.1", 0, ["tandem.v1.Worker"])
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
            (answer,) = [reply async for reply in call]
        names = {service.name for service in answer.list_services_response.service}
        assert {"tandem.v1.Worker", "grpc.health.v1.Health"} <= names
    finally:
        await server.stop(0)


async def test_a_port_in_use_is_a_config_error(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(lambda server: None) as address:
        second = RpcServer()
        with pytest.raises(ConfigError, match="already in use") as caught:
            await second.start("127.0.0.1", int(address.rpartition(":")[2]), (), option="--grpc-port")
        assert caught.value.field == "--grpc-port"
        assert capfd.readouterr() == ("", ""), "gRPC itself has nothing to add"
        await second.stop(0)


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_ipv6() -> None:
    server = RpcServer()
    port = await server.start("::1", 0, ())
    with pytest.raises(ConfigError, match="already in use"):
        await RpcServer().start("::1", port, ())
    await server.stop(0)


async def test_long_messages_pass_and_the_limit_may_be_lowered() -> None:
    """Above gRPC's own 4 MiB."""
    long = "x" * (5 << 20)
    async with (
        serving(lambda s: worker_pb2_grpc.add_WorkerServicer_to_server(Naming(long), s)) as address,
        open_channel(address) as channel,
    ):
        manifest = await worker_pb2_grpc.WorkerStub(channel).GetManifest(worker_pb2.GetManifestRequest())
    assert len(manifest.model) == len(long) < MAX_MESSAGE_BYTES

    server = RpcServer(max_message_bytes=100)
    worker_pb2_grpc.add_WorkerServicer_to_server(Naming(""), server.grpc)
    port = await server.start("127.0.0.1", 0, ())
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/tandem.v1.Worker/GetManifest", None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"x" * 200)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        await server.stop(0)


async def test_two_channels_to_one_address_share_no_connection() -> None:
    """So that the loss of one pair's stream says nothing of another's."""
    peers: list[str] = []

    class Peering(worker_pb2_grpc.WorkerServicer):
        async def GetManifest(self, request: object, context: grpc.aio.ServicerContext) -> worker_pb2.Manifest:  # type: ignore[type-arg]
            peers.append(context.peer())
            return worker_pb2.Manifest()

    async with (
        serving(lambda s: worker_pb2_grpc.add_WorkerServicer_to_server(Peering(), s)) as address,
        open_channel(address) as one,
        open_channel(address) as two,
    ):
        for channel in (one, two, one):
            await worker_pb2_grpc.WorkerStub(channel).GetManifest(worker_pb2.GetManifestRequest())
    assert peers[0] == peers[2] != peers[1]


async def test_the_blocking_channel_reaches_the_same_servers() -> None:
    def ask(address: str) -> str:
        with open_blocking_channel(address) as channel:
            model: str = (
                worker_pb2_grpc.WorkerStub(channel).GetManifest(worker_pb2.GetManifestRequest(), timeout=5).model
            )
            return model

    async with serving(lambda s: worker_pb2_grpc.add_WorkerServicer_to_server(Naming("m"), s)) as address:
        assert await asyncio.to_thread(ask, address) == "m"
