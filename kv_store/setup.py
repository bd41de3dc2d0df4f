"""A worker's end of all KV transfers, built from its options: transport and transfer thread as one thing."""

import asyncio
from collections.abc import Callable

import grpc.aio
from torch import Tensor

from common.errors import ConfigError
from common.pb.tandem.v1.worker_pb2 import WorkerStatus
from common.service.options import EngineOptions
from common.service.worker_process import WorkerContext
from kv_store.layout import KVShape
from kv_store.transfer.events import TransferEvent
from kv_store.transfer.worker import KVTransfer
from kv_store.transport.base import Transport
from kv_store.transport.select import advertise, attach, create_transport

#: Messages that may be gathered or under way at once on the sending side.
SEND_BUFFERS = 16
#: Slots follow each other in one region, and each must start where numbers of any size may.
SLOT_ALIGNMENT = 8


class KVEndpoint:
    """Transport and transfer thread of one worker process.

    Attributes:
        transfer: the thread, for the engine and whoever pairs.
    """

    def __init__(
        self,
        context: WorkerContext,
        options: EngineOptions,
        pages: Tensor,
        *,
        on_event: Callable[[TransferEvent], None],
    ) -> None:
        """Over `pages`, a KV cache's data; `on_event` is called on the transfer thread. An error of that thread brings
        the process down. Raises ConfigError for sizes or a transport that cannot work here."""
        identity = context.identity
        self._transport = create_transport(options.transport, f"{identity.worker_id}/{identity.incarnation}")
        self.transfer = create_transfer(
            self._transport, identity.incarnation, options, pages, on_event=on_event, on_failure=context.fail
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Before the server listens."""
        attach(self._transport, server)

    def start(self, address: str) -> None:
        """Peers reach this worker's gRPC server under `address`."""
        advertise(self._transport, address)
        self.transfer.start()

    async def stop(self) -> None:
        """Ends every transfer. The engine must have stopped: nothing else may touch the pages meanwhile."""
        await asyncio.to_thread(self.transfer.close)

    def fill_status(self, status: WorkerStatus) -> None:
        """Add the figures of slots, bytes and dropped messages; does not block."""
        counters = self.transfer.counters()
        staging = counters.staging
        status.staging.free = staging.free
        status.staging.granted = staging.granted
        status.staging.quarantined = staging.quarantined
        status.staging.total = staging.free + staging.granted + staging.quarantined
        status.transfer_bytes_sent_total = counters.bytes_sent
        status.transfer_bytes_received_total = counters.bytes_received
        status.dropped_messages = sum(counters.dropped.values())


def create_transfer(
    transport: Transport,
    incarnation: str,
    options: EngineOptions,
    pages: Tensor,
    *,
    on_event: Callable[[TransferEvent], None],
    on_failure: Callable[[BaseException], None],
) -> KVTransfer:
    """The transfer thread over `pages`, not yet started; see `KVTransfer` for `on_event` and `on_failure`.

    Raises ConfigError for sizes that cannot work.
    """
    if options.slot_bytes <= 0 or options.slot_bytes % SLOT_ALIGNMENT:
        raise ConfigError(
            f"{options.slot_bytes} bytes are no positive multiple of {SLOT_ALIGNMENT}", field="--slot-bytes"
        )
    token_bytes = KVShape.of(pages).token_layer_bytes
    if options.slot_bytes < token_bytes:
        raise ConfigError(f"one token's KV of one layer takes {token_bytes} bytes", field="--slot-bytes")
    slots = options.staging_memory // options.slot_bytes
    if slots < 2:
        raise ConfigError(
            f"holds {slots} slots of {options.slot_bytes} bytes; at least 2 are needed", field="--staging-memory"
        )
    return KVTransfer(
        transport=transport,
        pages=pages,
        staging_slots=slots,
        slot_bytes=options.slot_bytes,
        send_buffers=SEND_BUFFERS,
        incarnation=incarnation,
        checksum=options.checksum,
        on_event=on_event,
        on_failure=on_failure,
    )
