"""What is particular to the gRPC stream: refusals, old streams, dead addresses. The rest is in test_two_processes."""

import asyncio
import threading
from collections.abc import Iterator

import grpc
import pytest
import torch

from common.errors import ConfigError
from common.pb.tandem.v1.transport_pb2 import KvFrame
from common.pb.tandem.v1.transport_pb2_grpc import KvTransportStub
from common.rpc.channel import open_blocking_channel
from common.rpc.server import RpcServer
from kv_store.transport import select
from kv_store.transport.base import Notification, PeerUnreachable, WriteHandle, WriteState
from kv_store.transport.grpc_stream import GrpcTransport


@pytest.fixture
def receiver() -> Iterator[GrpcTransport]:
    """A transport behind a real server that runs on another thread, with 64 bytes of staging."""
    transport = GrpcTransport("agent/receiver")
    transport.register_staging(torch.zeros(64, dtype=torch.uint8))
    up, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = RpcServer()
        select.attach(transport, server.grpc)
        select.advertise(transport, f"127.0.0.1:{await server.start('127.0.0.1', 0, ['tandem.v1.KvTransport'])}")
        up.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert up.wait(20)
    yield transport
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
    transport.close()


@pytest.fixture
def sender(receiver: GrpcTransport) -> Iterator[GrpcTransport]:
    transport = GrpcTransport("agent/sender", "127.0.0.1:1")
    transport.register_source(torch.arange(64, dtype=torch.uint8))
    transport.connect("agent/receiver", receiver.metadata(), 0)
    yield transport
    transport.close()


def poll_until_settled(write: WriteHandle, receiver: GrpcTransport) -> list[Notification]:
    notifications = []
    while write.state() is WriteState.PENDING:
        notifications += receiver.poll()
    return notifications


def test_a_write_lands_before_its_notification_and_is_done_after(
    sender: GrpcTransport, receiver: GrpcTransport
) -> None:
    receiver.connect("agent/sender", sender.metadata(), 0)
    write = sender.write("agent/receiver", 8, 32, 16, b"header")
    assert poll_until_settled(write, receiver) == [Notification("agent/sender", b"header")]
    assert write.state() is WriteState.DONE
    assert receiver._staging is not None
    assert receiver._staging[32:48].tolist() == list(range(8, 24))
    write.release()


def test_a_write_of_a_peer_that_is_not_connected_is_refused(sender: GrpcTransport, receiver: GrpcTransport) -> None:
    write = sender.write("agent/receiver", 0, 0, 16, b"header")
    assert poll_until_settled(write, receiver) == []
    assert write.state() is WriteState.FAILED
    assert receiver._staging is not None
    assert not receiver._staging.any()
    with pytest.raises(PeerUnreachable):
        sender.write("agent/receiver", 0, 0, 16, b"header")


def test_a_stream_of_an_earlier_pairing_is_refused(sender: GrpcTransport, receiver: GrpcTransport) -> None:
    receiver.connect("agent/sender", sender.metadata(), 0)
    poll_until_settled(sender.write("agent/receiver", 0, 0, 8, b"first"), receiver)
    receiver.disconnect("agent/sender")
    receiver.connect("agent/sender", sender.metadata(), 0)
    write = sender.write("agent/receiver", 8, 0, 8, b"second")
    assert poll_until_settled(write, receiver) == []
    assert write.state() is WriteState.FAILED
    assert receiver._staging is not None
    assert receiver._staging[:8].tolist() == list(range(8))


def test_a_frame_outside_of_the_staging_region_is_refused(receiver: GrpcTransport) -> None:
    receiver.connect("agent/sender", b"127.0.0.1:1", 0)
    with open_blocking_channel(receiver.metadata().decode()) as channel:
        frame = KvFrame(agent="agent/sender", write_id=1, offset=60, payload=b"12345678", notification=b"header")
        call = KvTransportStub(channel).Push(iter([frame]))
        while not receiver._arrived:
            pass
        assert receiver.poll() == []
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "8 bytes at 60" in str(refused.value.details())


def test_writes_to_a_dead_address_fail() -> None:
    sender = GrpcTransport("agent/sender")
    sender.register_source(torch.zeros(8, dtype=torch.uint8))
    sender.connect("agent/gone", b"127.0.0.1:1", 0)
    write = sender.write("agent/gone", 0, 0, 8, b"header")
    poll_until_settled(write, sender)
    assert write.state() is WriteState.FAILED
    sender.close()


def test_pending_writes_fail_with_a_disconnect(sender: GrpcTransport, receiver: GrpcTransport) -> None:
    receiver.connect("agent/sender", sender.metadata(), 0)
    write = sender.write("agent/receiver", 0, 0, 8, b"header")
    sender.disconnect("agent/receiver")
    assert write.state() is WriteState.FAILED


def test_a_peer_without_an_address_is_unreachable() -> None:
    with pytest.raises(PeerUnreachable, match="no address"):
        GrpcTransport("agent/a").connect("agent/b", b"", 0)


def test_auto_takes_grpc_where_ucx_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_UCX_MODULE", "kv_store.transport.nowhere")
    assert select.create_transport("auto", "agent/a").kind == "grpc"
    with pytest.raises(ConfigError, match="UCX cannot be used here"):
        select.create_transport("ucx", "agent/a")
