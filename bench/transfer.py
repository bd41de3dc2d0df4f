"""How fast KV travels between two processes: GB/s by message size, and what a message costs, for each transport.

    python bench/transfer.py [--transports ucx,grpc] [--tokens 1500] [--sizes 64K,256K,1M,4M] [--seconds 2]

A figure covers the whole way: gather from pages, write, notification, scatter into pages, credits back. The
reference is a plain memcpy of the same number of bytes. Sender and receiver share this machine's cores.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from common.pb.tandem.v1.transport_pb2 import TransportPeer
from common.rpc.server import RpcServer
from kv_store.layout import KVShape
from kv_store.transfer.events import CreditsReady, ReceiveFinished, SendFinished, TransferEvent
from kv_store.transfer.worker import KVTransfer
from kv_store.transport.base import Transport
from kv_store.transport.select import advertise, attach, create_transport

#: SmolLM2-135M in fp32: layers, K and V, block size, kv heads, head dim.
LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 30, 16, 3, 64
#: Staging and send memory of each side, whatever the message size.
STAGING_BYTES, BUFFER_BYTES = 64 << 20, 16 << 20
UNITS = {"K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class Figures:
    seconds: float
    messages: int
    bytes: int


def make_pages(tokens: int) -> torch.Tensor:
    return torch.randn(LAYERS, 2, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, KV_HEADS, HEAD_DIM)


def make_transfer(
    kind: str, name: str, tokens: int, slot_bytes: int, events: "SimpleQueue[TransferEvent]"
) -> KVTransfer:
    transport = create_transport(kind, name)  # type: ignore[arg-type]
    serve(transport)
    transfer = KVTransfer(
        transport=transport,
        pages=make_pages(tokens),
        staging_slots=max(4, min(4096, STAGING_BYTES // slot_bytes)),
        slot_bytes=slot_bytes,
        send_buffers=max(4, min(64, BUFFER_BYTES // slot_bytes)),
        incarnation=name,
        checksum=False,
        on_event=events.put,
        on_failure=abandon,
    )
    transfer.start()
    return transfer


def abandon(failure: BaseException) -> None:
    """Without its transfer thread this process would wait for ever."""
    print(f"the transfer thread failed: {failure!r}", file=sys.stderr, flush=True)
    os._exit(1)


def serve(transport: Transport) -> None:
    """The gRPC server that the gRPC transport receives through."""
    ready = threading.Event()

    async def run() -> None:
        server = RpcServer()
        attach(transport, server.grpc)
        advertise(transport, f"127.0.0.1:{await server.start('127.0.0.1', 0, ['tandem.v1.KvTransport'])}")
        ready.set()
        await server.grpc.wait_for_termination()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    ready.wait()


def receive(pipe: Connection, kind: str, tokens: int, slot_bytes: int) -> None:
    """The receiving process: obeys the pipe, and answers with its events."""
    torch.set_num_threads(1)
    events: SimpleQueue[TransferEvent] = SimpleQueue()
    transfer = make_transfer(kind, "receiver", tokens, slot_bytes, events)
    pipe.send(transfer.local_peer().SerializeToString())
    transfer.connect("sender", TransportPeer.FromString(pipe.recv()), receive=True).result(30)

    def forward() -> None:
        while True:
            pipe.send(events.get())

    threading.Thread(target=forward, daemon=True).start()
    while (command := pipe.recv()) is not None:
        name, *arguments = command
        getattr(transfer, name)(*arguments)
    transfer.close()


class Sender:
    """This process: sends whole prompts and waits until they have landed."""

    def __init__(self, kind: str, tokens: int, slot_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=receive, args=(theirs, kind, tokens, slot_bytes), daemon=True)
        self._child.start()
        self._tokens = tokens
        self._slots = list(range(tokens))
        self._landed: SimpleQueue[ReceiveFinished] = SimpleQueue()
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._transfer = make_transfer(kind, "sender", tokens, slot_bytes, self._events)
        self._pipe.send(self._transfer.local_peer().SerializeToString())
        peer = TransportPeer.FromString(self._pipe.recv())
        self._transfer.connect("receiver", peer, receive=False).result(30)
        threading.Thread(target=self._pump, daemon=True).start()
        self._next_id = 0

    def send(self) -> Figures:
        self._next_id += 1
        number = self._next_id
        self._pipe.send(("open_receive", number, "sender", 0, self._slots))
        began = time.perf_counter()
        self._transfer.open_send(number, "receiver", self._tokens, 0)
        chunk = self._transfer.begin_chunk(number, 0, self._slots)
        self._transfer.layers_ready([chunk], LAYERS)
        self._transfer.close_send(number)
        finished = self._events.get()
        assert isinstance(finished, SendFinished), finished
        assert finished.outcome == "ok", finished
        self._pipe.send(("seal", number, finished.messages, finished.bytes))
        landed = self._landed.get()
        assert landed.outcome == "ok", landed
        return Figures(time.perf_counter() - began, landed.messages, landed.bytes)

    def close(self) -> None:
        self._pipe.send(None)
        self._child.join()
        self._transfer.close()

    def _pump(self) -> None:
        while True:
            try:
                event = self._pipe.recv()
            except EOFError:
                return
            if isinstance(event, CreditsReady):
                self._transfer.add_credits("receiver", event.grants)
            elif isinstance(event, ReceiveFinished):
                self._landed.put(event)


def best_of(kind: str, tokens: int, slot_bytes: int, seconds: float) -> Figures:
    """The fastest of as many transfers as fit into `seconds` (the first, which warms up, left out)."""
    sender = Sender(kind, tokens, slot_bytes)
    sender.send()
    deadline = time.perf_counter() + seconds
    runs = [sender.send()]
    while time.perf_counter() < deadline:
        runs.append(sender.send())
    sender.close()
    return min(runs, key=lambda run: run.seconds)


def memcpy_rate(num_bytes: int) -> float:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return num_bytes / min(times) / 1e9


def parse_size(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="ucx,grpc")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--sizes", default="64K,256K,1M,4M")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = KVShape.of(make_pages(1))
    total = shape.message_bytes(LAYERS, options.tokens)
    print(f"{options.tokens} tokens of {LAYERS} layers = {total / 1e6:.1f} MB; memcpy {memcpy_rate(total):.1f} GB/s")
    print(f"{'transport':<10}{'message':>10}{'messages':>10}{'ms':>9}{'GB/s':>8}{'µs/message':>12}")
    for kind in options.transports.split(","):
        for text in options.sizes.split(","):
            figures = best_of(kind, options.tokens, parse_size(text), options.seconds)
            rate, each = figures.bytes / figures.seconds / 1e9, figures.seconds / figures.messages * 1e6
            print(f"{kind:<10}{text:>10}{figures.messages:>10}{figures.seconds * 1e3:>9.2f}{rate:>8.2f}{each:>12.0f}")
        # Messages of one token in one layer: all price, no bytes.
        tiny = best_of(kind, 20, shape.token_layer_bytes, options.seconds)
        print(f"{kind:<10}{'overhead':>10}{tiny.messages:>10}{'':>17}{tiny.seconds / tiny.messages * 1e6:>12.0f}")


if __name__ == "__main__":
    main()
