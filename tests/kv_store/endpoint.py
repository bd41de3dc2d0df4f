"""A worker's transfer thread in a process of its own, driven by JSON lines: commands on stdin, events on stdout.

Run as `python -m tests.kv_store.endpoint '{"transport": "ucx", ...}'`; see `Endpoint` in processes.py.
"""

import asyncio
import base64
import dataclasses
import hashlib
import json
import logging
import sys
import threading
import time
from typing import Any

import torch

from common.pb.tandem.v1.transport_pb2 import TransportPeer
from common.rpc.server import RpcServer
from kv_store.staging import SlotGrant
from kv_store.transfer.events import TransferEvent
from kv_store.transfer.worker import KVTransfer
from kv_store.transport.base import Transport
from kv_store.transport.select import advertise, attach, create_transport


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def on_event(event: TransferEvent) -> None:
    say(event=type(event).__name__, **dataclasses.asdict(event))


def serve(transport: Transport) -> None:
    """The worker's gRPC server, on a thread of its own."""
    ready = threading.Event()

    async def run() -> None:
        server = RpcServer()
        attach(transport, server.grpc)
        port = await server.start("127.0.0.1", 0, ["tandem.v1.KvTransport"])
        advertise(transport, f"127.0.0.1:{port}")
        ready.set()
        await server.grpc.wait_for_termination()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    ready.wait()


class Commands:
    """One method per command."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(options["seed"])
        torch.set_num_threads(1)
        layers, blocks, block_size, heads, dim = options["shape"]
        self.pages = torch.randn(layers, 2, blocks, block_size, heads, dim)
        transport = create_transport(options["transport"], f"agent/{options['name']}")
        serve(transport)
        self.failure: BaseException | None = None
        self.transfer = KVTransfer(
            transport=transport,
            pages=self.pages,
            staging_slots=options["slots"],
            slot_bytes=options["slot_bytes"],
            send_buffers=options["buffers"],
            incarnation=options["name"],
            checksum=options.get("checksum", True),
            on_event=on_event,
            on_failure=self.fail,
        )
        self.transfer.start()
        say(event="Ready", info=base64.b64encode(self.transfer.local_peer().SerializeToString()).decode())

    def fail(self, failure: BaseException) -> None:
        self.failure = failure

    def connect(self, peer: str, info: str, receive: bool) -> None:
        theirs = TransportPeer.FromString(base64.b64decode(info))
        future = self.transfer.connect(peer, theirs, receive=receive)
        future.add_done_callback(lambda done: say(event="Connected", peer=peer, error=repr(done.exception())))

    def disconnect(self, peer: str) -> None:
        self.transfer.disconnect(peer)

    def prove_dead(self, peer: str) -> None:
        self.transfer.prove_dead(peer)

    def credits(self, peer: str, grants: list[dict[str, int]]) -> None:
        self.transfer.add_credits(peer, [SlotGrant(**grant) for grant in grants])

    def send(
        self, transfer_id: int, peer: str, slots: list[int], chunk: int, layer_seconds: float = 0.0, close: bool = True
    ) -> None:
        """Pretend to compute the prompt chunk by chunk, layer by layer."""
        self.transfer.open_send(transfer_id, peer, len(slots), 0)
        for start in range(0, len(slots), chunk):
            chunk_id = self.transfer.begin_chunk(transfer_id, start, slots[start : start + chunk])
            for layer in range(len(self.pages)):
                time.sleep(layer_seconds)
                self.transfer.layers_ready([chunk_id], layer + 1)
        if close:
            self.transfer.close_send(transfer_id)

    def abort_send(self, transfer_id: int) -> None:
        self.transfer.abort_send(transfer_id)

    def receive(self, transfer_id: int, peer: str, slots: list[int]) -> None:
        self.transfer.open_receive(transfer_id, peer, 0, slots)

    def abort_receive(self, transfer_id: int) -> None:
        self.transfer.abort_receive(transfer_id)

    def seal(self, transfer_id: int, messages: int, num_bytes: int) -> None:
        self.transfer.seal(transfer_id, messages, num_bytes)

    def digest(self, tag: int, slots: list[int]) -> None:
        layers, _, _, _, heads, dim = self.pages.shape
        tokens = self.pages.view(layers, 2, -1, heads, dim)[:, :, slots].contiguous()
        say(event="Digest", tag=tag, digest=hashlib.sha256(tokens.numpy().tobytes()).hexdigest())

    def count(self, tag: int) -> None:
        say(
            event="Counters",
            tag=tag,
            failure=repr(self.failure),
            **dataclasses.asdict(self.transfer.counters()),
        )


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    commands = Commands(json.loads(sys.argv[1]))
    for line in sys.stdin:
        message = json.loads(line)
        getattr(commands, message.pop("do"))(**message)
    commands.transfer.close()
    say(event="Closed", failure=repr(commands.failure))


if __name__ == "__main__":
    main()
