"""One worker's transfer state: memory, sender, receiver and pairing, moved on round by round. No thread of its own."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from common.pb.tandem.v1.transport_pb2 import TransportPeer
from kv_store.layout import PageCopier
from kv_store.process import ProcessId
from kv_store.transfer.counters import Drop, TransferCounters
from kv_store.transfer.events import TransferEvent
from kv_store.transfer.pairing import Pairing
from kv_store.transfer.receiver import KVReceiver
from kv_store.transfer.sender import KVSender
from kv_store.transport.base import Transport


class TransferMachine:
    """Symmetric: any worker can send and receive. Called on one thread only, `local_peer` excepted."""

    def __init__(
        self,
        *,
        transport: Transport,
        pages: Tensor,
        staging_slots: int,
        slot_bytes: int,
        send_buffers: int,
        incarnation: str,
        checksum: bool,
        emit: Callable[[TransferEvent], None],
        clock: Callable[[], float],
        device: torch.device,
        seal_timeout: float,
    ) -> None:
        self.copier = PageCopier(pages)
        assert slot_bytes % 8 == 0, f"slots of {slot_bytes} bytes misalign the words that rows are copied as"
        self._staging = torch.zeros(staging_slots * slot_bytes, dtype=torch.uint8, device=device)
        buffers = torch.zeros(send_buffers * slot_bytes, dtype=torch.uint8, device=device)
        transport.register_source(buffers)
        transport.register_staging(self._staging)
        self._transport = transport
        self._slot_bytes = slot_bytes
        self._device = device
        self.sender = KVSender(
            incarnation=incarnation,
            copier=self.copier,
            transport=transport,
            buffers=buffers,
            buffer_bytes=slot_bytes,
            with_checksum=checksum,
            emit=emit,
            clock=clock,
        )
        self.receiver = KVReceiver(
            incarnation=incarnation,
            copier=self.copier,
            staging=self._staging,
            slot_bytes=slot_bytes,
            emit=emit,
            clock=clock,
            seal_timeout=seal_timeout,
        )
        self.pairing = Pairing(
            transport=transport,
            sender=self.sender,
            receiver=self.receiver,
            token_bytes=self.copier.shape.token_layer_bytes,
            emit=emit,
            clock=clock,
        )

    def enter_thread(self) -> None:
        """To be called first on the thread that calls `round`."""
        if self._device.type == "cuda":
            # Without a current context UCX would silently go without device-to-device copies.
            torch.cuda.set_device(self._device)

    def round(self) -> bool:
        """Everything that can be done now; returns whether something moved or is moving."""
        notifications = self._transport.poll()
        for notification in notifications:
            peer = self.pairing.name_of(notification.peer)
            self.receiver.on_message(peer or notification.peer, notification.payload)
        for peer, reason in self.sender.progress():
            self.pairing.lose(peer, reason)
        self.pairing.tick()
        self.receiver.tick()
        return bool(notifications or self.sender.num_writes)

    @property
    def wants_polling(self) -> bool:
        """Whether transfers or pairings wait for something that only polling shows."""
        return bool(self.sender.num_open or self.receiver.num_open) or self.pairing.wants_polling

    @property
    def is_paired(self) -> bool:
        """Whether there is anybody who could make use of an occasional round."""
        return self.pairing.num_peers > 0 or self.pairing.has_quarantine

    def finish(self, reason: str, patience: float) -> None:
        """Fail what is open, let writes end for up to `patience` seconds, and close the transport."""
        self.sender.fail_all(reason)
        self.receiver.fail_all(reason)
        self.pairing.fail_waiting(reason)
        deadline = time.monotonic() + patience
        while self.sender.num_writes and time.monotonic() < deadline:
            self._transport.poll()
            self.sender.progress()
            time.sleep(1e-3)
        self._transport.close()

    def local_peer(self) -> TransportPeer:
        """What the other side of a pair needs to know of this one."""
        process = ProcessId.own()
        return TransportPeer(
            transport=self._transport.kind,
            agent=self._transport.agent,
            metadata=self._transport.metadata(),
            staging_base=self._staging.data_ptr(),
            slot_bytes=self._slot_bytes,
            num_slots=self._staging.numel() // self._slot_bytes,
            host_id=process.host_id,
            pid=process.pid,
            process_start=process.start,
        )

    def count(self) -> TransferCounters:
        sender, receiver = self.sender, self.receiver
        return TransferCounters(
            messages_sent=sender.totals.messages,
            bytes_sent=sender.totals.bytes,
            messages_received=receiver.totals.messages,
            bytes_received=receiver.totals.bytes,
            dropped={drop.value: receiver.totals.dropped[drop] for drop in Drop},
            staging=receiver.staging_counts(),
            send_buffers_in_use=sender.buffers_in_use,
            open_sends=sender.num_open,
            open_receives=receiver.num_open,
            writes_in_flight=sender.num_writes,
            peers=self.pairing.num_peers,
            quarantined_out_of_sight=self.pairing.quarantined_out_of_sight(),
        )
