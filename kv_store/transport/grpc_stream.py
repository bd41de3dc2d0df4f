"""Writes over a gRPC stream, for machines without nixl: same contract as UCX, one more copy on each side.

The sender opens `KvTransport.Push` towards the receiver's gRPC address from threads of its own; the receiver's
servicer runs on the worker's event loop and only hands frames over. Both memories are touched in `write` and
`poll` alone, that is, on the transfer thread.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import grpc
import grpc.aio
import numpy as np
import torch
from torch import Tensor

from common.pb.tandem.v1.transport_pb2 import KvAck, KvFrame
from common.pb.tandem.v1.transport_pb2_grpc import (
    KvTransportServicer,
    KvTransportStub,
    add_KvTransportServicer_to_server,
)
from common.rpc.channel import open_blocking_channel
from kv_store.transport.base import Notification, PeerUnreachable, WriteState

logger = logging.getLogger(__name__)

#: Frames that one stream may have waiting for the transfer thread; credits keep an honest sender below it.
MAX_WAITING_FRAMES = 256


class GrpcTransport:
    """Both ends of the streams of one worker."""

    kind = "grpc"
    #: A frame of a peer that was disconnected is dropped before it touches memory.
    revokes_on_disconnect = True

    def __init__(self, agent: str, address: str = "") -> None:
        self.agent = agent
        #: `host:port` of this worker's gRPC server as peers reach it; set before `metadata` is asked for.
        self.address = address
        self._source: Tensor | None = None
        self._staging: Tensor | None = None
        self._lanes: dict[str, _PushLane] = {}
        self._arrived: deque[_Arrival] = deque()
        #: Goes up with each pairing, so that streams of earlier ones can be told.
        self._epoch = 0

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Serve `KvTransport` on `server` (before it starts)."""
        servicer = _Servicer(self._arrived.append, lambda: self._epoch)
        add_KvTransportServicer_to_server(servicer, server)

    def register_staging(self, memory: Tensor) -> None:
        self._staging = memory

    def register_source(self, memory: Tensor) -> None:
        self._source = memory

    def metadata(self) -> bytes:
        return self.address.encode()

    def connect(self, peer: str, metadata: bytes, staging_base: int) -> None:
        address = metadata.decode(errors="replace")
        if ":" not in address:
            raise PeerUnreachable(f"{peer} announces no address of its KV transport")
        self.disconnect(peer)
        self._epoch += 1
        self._lanes[peer] = _PushLane(self.agent, peer, address, self._epoch)

    def disconnect(self, peer: str) -> None:
        lane = self._lanes.pop(peer, None)
        if lane is not None:
            lane.close()

    def write(self, peer: str, source_offset: int, offset: int, length: int, notification: bytes) -> "GrpcWrite":
        assert self._source is not None, "register_source comes first"
        if peer not in self._lanes:
            raise PeerUnreachable(f"{peer} is not connected")
        payload = self._source[source_offset : source_offset + length].cpu().numpy().tobytes()
        return self._lanes[peer].push(offset, payload, notification)

    def poll(self) -> list[Notification]:
        notifications = []
        for _ in range(len(self._arrived)):
            arrival = self._arrived.popleft()
            refusal = self._land(arrival.frame, arrival.epoch)
            arrival.answer(refusal)
            if refusal is None:
                notifications.append(Notification(arrival.frame.agent, arrival.frame.notification))
        return notifications

    def close(self) -> None:
        for peer in list(self._lanes):
            self.disconnect(peer)

    def _land(self, frame: KvFrame, epoch: int) -> str | None:
        """Copy a frame into the staging region; returns why it was refused instead.

        A sender opens its stream after this side has paired with it, because before that it has no credit: an
        older stream is one of an earlier pairing, whose slots may have been granted anew.
        """
        lane = self._lanes.get(frame.agent)
        if lane is None or epoch < lane.epoch:
            return f"{frame.agent} is not connected"
        room = 0 if self._staging is None else self._staging.numel()
        if self._staging is None or frame.offset + len(frame.payload) > room:
            return f"{len(frame.payload)} bytes at {frame.offset} in a staging region of {room}"
        region = self._staging[frame.offset : frame.offset + len(frame.payload)]
        if region.is_cuda:
            region.copy_(torch.frombuffer(bytearray(frame.payload), dtype=torch.uint8))
        else:
            region.numpy()[:] = np.frombuffer(frame.payload, dtype=np.uint8)
        return None


class GrpcWrite:
    """A frame that waits for its acknowledgement. Its payload was copied, so the source is free at once."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = WriteState.PENDING

    def state(self) -> WriteState:
        return self._state

    def settle(self, state: WriteState) -> None:
        self._state = state

    def release(self) -> None:
        assert self._state is not WriteState.PENDING, "a pending write cannot be released"


class _PushLane:
    """The sender's stream to one peer: a queue that gRPC drains, and a thread that reads acknowledgements."""

    def __init__(self, agent: str, peer: str, address: str, epoch: int) -> None:
        self.epoch = epoch
        self._agent = agent
        self._peer = peer
        self._outbox: queue.SimpleQueue[KvFrame | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[int, GrpcWrite] = {}
        self._next_id = 0
        self._failure: str | None = None
        self._channel = open_blocking_channel(address)
        self._call: grpc.CallIterator[KvAck] | None = None
        self._reader: threading.Thread | None = None

    def push(self, offset: int, payload: bytes, notification: bytes) -> GrpcWrite:
        write = GrpcWrite()
        with self._lock:
            if self._failure is not None:
                raise PeerUnreachable(f"{self._peer}: {self._failure}")
            self._next_id += 1
            self._pending[self._next_id] = write
            frame = KvFrame(
                agent=self._agent, write_id=self._next_id, offset=offset, payload=payload, notification=notification
            )
        self._outbox.put(frame)
        if self._reader is None:
            self._open()
        return write

    def close(self) -> None:
        self._fail("disconnected")
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()  # type: ignore[no-untyped-call]
        self._channel.close()
        if self._reader is not None:
            self._reader.join()

    def _open(self) -> None:
        """Only a side that sends needs a stream: it is opened by the first write."""
        self._call = KvTransportStub(self._channel).Push(self._frames())
        self._reader = threading.Thread(target=self._read, name=f"kv-acks-{self._peer}", daemon=True)
        self._reader.start()

    def _frames(self) -> Iterator[KvFrame]:
        while (frame := self._outbox.get()) is not None:
            yield frame

    def _read(self) -> None:
        assert self._call is not None
        try:
            for ack in self._call:
                with self._lock:
                    write = self._pending.pop(ack.write_id, None)
                if write is not None:
                    write.settle(WriteState.DONE)
            self._fail("the peer ended the stream")
        except grpc.RpcError:
            self._fail(f"{self._call.code()}: {self._call.details()}")
        self._outbox.put(None)

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._failure = self._failure or reason
            failed = list(self._pending.values())
            self._pending.clear()
        for write in failed:
            write.settle(WriteState.FAILED)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A frame on its way to the transfer thread; `answer(None)` acknowledges it, a reason ends the stream."""

    frame: KvFrame
    #: The transport's epoch when the stream was opened.
    epoch: int
    answer: Callable[[str | None], None]


class _Servicer(KvTransportServicer):
    """Frames in, acknowledgements out, nothing decided here."""

    def __init__(self, deliver: Callable[[_Arrival], None], current_epoch: Callable[[], int]) -> None:
        self._deliver = deliver
        self._current_epoch = current_epoch

    async def Push(
        self, request_iterator: AsyncIterator[KvFrame], context: grpc.aio.ServicerContext[KvFrame, KvAck]
    ) -> AsyncIterator[KvAck]:
        stream = _ReceivingStream(self._deliver, self._current_epoch())
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            while (ack := await stream.next_ack()) is not None:
                yield ack
        finally:
            reader.cancel()
            # A stream that broke shows here too; the sender's writes have failed on its side.
            await asyncio.gather(reader, return_exceptions=True)
        if stream.refusal is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, stream.refusal)


class _ReceivingStream:
    """One sender's stream on the receiver's event loop."""

    def __init__(self, deliver: Callable[[_Arrival], None], epoch: int) -> None:
        self.refusal: str | None = None
        self._epoch = epoch
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._acks: asyncio.Queue[KvAck | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_WAITING_FRAMES)
        self._unanswered = 0
        self._ended = False

    async def read(self, frames: AsyncIterator[KvFrame]) -> None:
        try:
            async for frame in frames:
                await self._room.acquire()
                self._unanswered += 1
                self._deliver(_Arrival(frame, self._epoch, self._answerer(frame.write_id)))
        except BaseException:
            self._acks.put_nowait(None)
            raise
        self._ended = True
        self._end_if_answered()

    async def next_ack(self) -> KvAck | None:
        return await self._acks.get()

    def _answerer(self, write_id: int) -> Callable[[str | None], None]:
        def answer(refusal: str | None) -> None:
            """Called on the transfer thread."""
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._settle, write_id, refusal)

        return answer

    def _settle(self, write_id: int, refusal: str | None) -> None:
        self._room.release()
        self._unanswered -= 1
        if refusal is None:
            self._acks.put_nowait(KvAck(write_id=write_id))
            self._end_if_answered()
        else:
            self.refusal = refusal
            self._acks.put_nowait(None)

    def _end_if_answered(self) -> None:
        """A sender that has said all still gets its acknowledgements."""
        if self._ended and self._unanswered == 0:
            self._acks.put_nowait(None)
