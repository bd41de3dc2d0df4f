"""Builds a worker's transfer thread from its options."""

from collections.abc import Callable

from torch import Tensor

from common.errors import ConfigError
from common.pb.tandem.v1.worker_pb2 import WorkerStatus
from common.service.options import EngineOptions
from kv_store.layout import KVShape
from kv_store.transfer.counters import TransferCounters
from kv_store.transfer.events import TransferEvent
from kv_store.transfer.worker import KVTransfer
from kv_store.transport.base import Transport

#: Messages that may be gathered or under way at once on the sending side.
SEND_BUFFERS = 16
#: Slots follow each other in one region, and each must start where numbers of any size may.
SLOT_ALIGNMENT = 8


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


def fill_transfer_status(status: WorkerStatus, counters: TransferCounters) -> None:
    """Put the transfer thread's figures into a worker's status."""
    staging = counters.staging
    status.staging.free = staging.free
    status.staging.granted = staging.granted
    status.staging.quarantined = staging.quarantined
    status.staging.total = staging.free + staging.granted + staging.quarantined
    status.transfers = counters.open_sends + counters.open_receives
    status.transfer_bytes_sent_total = counters.bytes_sent
    status.transfer_bytes_received_total = counters.bytes_received
    status.dropped_messages = sum(counters.dropped.values())
