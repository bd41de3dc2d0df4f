"""The sending half of a worker: from pages to a peer's staging slots. No thread and no clock of its own.

Life of a send: open -> chunks are begun and their layers become ready while the engine computes -> each message is
gathered into a send buffer and written as soon as the chunk's rule, a credit and a buffer allow -> close, or abort
-> SendFinished when the last write is over. Compute never waits: without credit, ready layers stay in their pages.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kv_store.layout import MessageRange, PageCopier, Slots
from kv_store.staging import SendBuffers, SlotGrant
from kv_store.transfer.chunk import OutgoingChunk
from kv_store.transfer.counters import SenderTotals
from kv_store.transfer.events import Outcome, SendFinished, TransferEvent
from kv_store.transfer.header import checksum, make_header
from kv_store.transfer.lane import Lane, Send, Write
from kv_store.transport.base import PeerUnreachable, Transport, WriteState


class KVSender:
    """Owns the send buffers and all open sends of a worker. Called on one thread only."""

    def __init__(
        self,
        *,
        incarnation: str,
        copier: PageCopier,
        transport: Transport,
        buffers: Tensor,
        buffer_bytes: int,
        with_checksum: bool,
        emit: Callable[[TransferEvent], None],
        clock: Callable[[], float],
    ) -> None:
        assert buffers.numel() % buffer_bytes == 0, f"{buffers.numel()} bytes are no multiple of {buffer_bytes}"
        self.totals = SenderTotals()
        self._incarnation = incarnation
        self._copier = copier
        self._transport = transport
        self._memory = buffers
        self._buffer_bytes = buffer_bytes
        self._with_checksum = with_checksum
        self._emit = emit
        self._clock = clock
        self._buffers = SendBuffers(buffers.numel() // buffer_bytes)
        self._lanes: dict[str, Lane] = {}
        #: Lanes of peers that were disconnected while writes were under way.
        self._draining: dict[str, Lane] = {}
        #: Peers towards which a write failed: nobody knows what of it may still arrive there.
        self._uncertain: set[str] = set()
        self._sends: dict[int, Send] = {}
        self._send_of_chunk: dict[int, Send] = {}
        #: What the device has yet to finish: (event, chunk ids, layers done), in the order of its stream.
        self._computing: deque[tuple[torch.cuda.Event, Sequence[int], int]] = deque()

    # --- peers ---------------------------------------------------------------------------------------

    def add_peer(self, peer: str, agent: str, slot_bytes: int, num_slots: int) -> None:
        assert peer not in self._lanes and peer not in self._draining, f"{peer} is connected already"
        self._lanes[peer] = Lane(peer, agent, slot_bytes, num_slots)

    def add_credits(self, peer: str, grants: Sequence[SlotGrant]) -> None:
        """Slots of `peer` that may be written once each; ignored when it is not connected (any more)."""
        lane = self._lanes.get(peer)
        if lane is not None:
            lane.credits.extend(grant for grant in grants if grant.slot < lane.num_slots)

    def remove_peer(self, peer: str, reason: str) -> None:
        """Fail the sends to `peer`; its writes go on in the background until `draining` says no more."""
        lane = self._lanes.pop(peer, None)
        if lane is None:
            return
        for send in list(lane.sends.values()):
            self._finish(send, "failed", reason)
        for write in lane.writes:
            write.send = None
        if lane.writes:
            self._draining[peer] = lane

    def draining(self, peer: str) -> bool:
        """Whether writes of an earlier pairing with `peer` are still under way."""
        return peer in self._draining

    def uncertain(self, peer: str) -> bool:
        """Whether a write to `peer` failed, so that only its death proves that nothing arrives there any more."""
        return peer in self._uncertain

    # --- sends ---------------------------------------------------------------------------------------

    def open(self, transfer_id: int, peer: str, num_prompt_tokens: int, first_token: int) -> None:
        """Begin a send of tokens [first_token, num_prompt_tokens); fails at once if `peer` is not connected."""
        send = Send(transfer_id, peer, first_token, num_prompt_tokens, last_ready=self._clock())
        if transfer_id in self._sends:
            self._report(send, "failed", f"transfer id {transfer_id} is in use")
        elif peer not in self._lanes:
            self._report(send, "failed", f"{peer} is not connected")
        else:
            self._sends[transfer_id] = self._lanes[peer].sends[transfer_id] = send

    def begin_chunk(self, transfer_id: int, chunk_id: int, first_token: int, slots: Slots) -> None:
        """Tokens [first_token, +len(slots)) are about to be computed; ignored if the send is over."""
        send = self._sends.get(transfer_id)
        if send is None or send.aborting or len(slots) == 0:
            return
        self._copier.check_slots(slots)
        end = first_token + len(slots)
        expected = send.first_token + send.tokens_begun
        assert first_token == expected, f"chunk at token {first_token} of {transfer_id}, expected at {expected}"
        assert end <= send.num_prompt_tokens, f"chunk ends at {end} of {send.num_prompt_tokens} tokens"
        send.chunks[chunk_id] = OutgoingChunk(
            self._copier.shape,
            first_token,
            slots,
            slot_bytes=min(self._lanes[send.peer].slot_bytes, self._buffer_bytes),
            ends_prompt=end == send.num_prompt_tokens,
        )
        send.tokens_begun += len(slots)
        self._send_of_chunk[chunk_id] = send

    def layers_ready(
        self, chunk_ids: Sequence[int], num_layers_done: int, event: torch.cuda.Event | None, at: float
    ) -> None:
        """Layers [0, num_layers_done) of those chunks are final once `event` (if any) has happened."""
        if event is not None:
            self._computing.append((event, chunk_ids, num_layers_done))
        else:
            self._mark_ready(chunk_ids, num_layers_done, at)

    def close(self, transfer_id: int) -> None:
        """Nothing is added to this send any more."""
        send = self._sends.get(transfer_id)
        if send is not None:
            send.closing = True
            self._settle(send)

    def abort(self, transfer_id: int) -> None:
        """Send nothing more; SendFinished follows when no write is under way."""
        send = self._sends.get(transfer_id)
        if send is not None:
            send.aborting = True
            self._forget_chunks(send)
            self._settle(send)

    # --- progress ------------------------------------------------------------------------------------

    def progress(self) -> list[tuple[str, str]]:
        """Collect finished writes, post new ones. Returns peers that turned out to be gone, and why."""
        lost = []
        self._collect_computed()
        for lane in list(self._draining.values()):
            self._reap(lane)
            if not lane.writes:
                del self._draining[lane.peer]
        for lane in list(self._lanes.values()):
            reason = self._reap(lane) or self._push(lane)
            if reason is not None:
                lost.append((lane.peer, reason))
        return lost

    @property
    def num_open(self) -> int:
        return len(self._sends)

    @property
    def num_writes(self) -> int:
        return sum(len(lane.writes) for lanes in (self._lanes, self._draining) for lane in lanes.values())

    @property
    def buffers_in_use(self) -> int:
        return self._buffers.in_use

    def fail_all(self, reason: str) -> None:
        """The transfer thread ends: every open send fails."""
        for send in list(self._sends.values()):
            self._finish(send, "failed", reason)

    # --- inside --------------------------------------------------------------------------------------

    def _collect_computed(self) -> None:
        while self._computing and self._computing[0][0].query():  # type: ignore[no-untyped-call]
            _, chunk_ids, num_layers_done = self._computing.popleft()
            self._mark_ready(chunk_ids, num_layers_done, self._clock())

    def _mark_ready(self, chunk_ids: Sequence[int], num_layers_done: int, at: float) -> None:
        for chunk_id in chunk_ids:
            send = self._send_of_chunk.get(chunk_id)
            if send is not None:
                send.chunks[chunk_id].set_ready(num_layers_done)
                send.last_ready = at

    def _reap(self, lane: Lane) -> str | None:
        """Account for the writes of `lane` that are over; returns a reason if one of them failed."""
        reason = None
        for write in lane.ended_writes():
            done = write.handle.state() is WriteState.DONE
            write.handle.release()
            self._buffers.release(lane.peer, write.buffer)
            if not done:
                reason = "a write failed"
                self._uncertain.add(lane.peer)
            if write.send is not None:
                self._account(write.send, write.num_bytes if done else None)
        return reason

    def _account(self, send: Send, num_bytes: int | None) -> None:
        """A write of `send` is over; `num_bytes` is None if it failed (its peer is lost then)."""
        send.writes_in_flight -= 1
        if num_bytes is None:
            return
        send.messages += 1
        send.bytes += num_bytes
        send.last_done = self._clock()
        self.totals.messages += 1
        self.totals.bytes += num_bytes
        self._settle(send)

    def _push(self, lane: Lane) -> str | None:
        """Post what is due to `lane`, oldest transfer first; returns a reason if the peer is gone."""
        for send in list(lane.sends.values()):
            for chunk_id, chunk in list(send.chunks.items()):
                while self._can_write(lane) and (part := chunk.next_message()) is not None:
                    try:
                        self._write(lane, send, chunk, part)
                    except PeerUnreachable as error:
                        return str(error)
                if chunk.sent_whole:
                    del send.chunks[chunk_id], self._send_of_chunk[chunk_id]
        return None

    def _can_write(self, lane: Lane) -> bool:
        return bool(lane.credits) and self._buffers.available(lane.peer, len(self._lanes))

    def _write(self, lane: Lane, send: Send, chunk: OutgoingChunk, part: MessageRange) -> None:
        num_bytes = self._copier.shape.message_bytes(part.num_layers, part.num_tokens)
        buffer = self._buffers.acquire(lane.peer)
        offset = buffer * self._buffer_bytes
        wire = self._memory[offset : offset + num_bytes]
        slots = chunk.slots[part.first_token : part.first_token + part.num_tokens]
        self._copier.gather(part.first_layer, part.num_layers, slots, wire)
        grant = lane.credits.pop()
        header = make_header(send.transfer_id, self._incarnation, send.peer, grant, part, num_bytes, send.sequence)
        header.first_token += chunk.first_token
        header.num_heads = self._copier.shape.kv_heads
        if self._with_checksum:
            header.checksum = checksum(wire)
        try:
            handle = self._transport.write(
                lane.agent, offset, grant.slot * lane.slot_bytes, num_bytes, header.SerializeToString()
            )
        except PeerUnreachable:
            self._buffers.release(lane.peer, buffer)
            raise
        send.first_queued = send.first_queued or self._clock()
        send.sequence += 1
        send.writes_in_flight += 1
        lane.writes.append(Write(handle, buffer, num_bytes, send))

    def _settle(self, send: Send) -> None:
        """End `send` if nothing is left to wait for."""
        if send.writes_in_flight:
            return
        if send.aborting:
            self._finish(send, "aborted", "aborted")
        elif send.closing and send.sent_all:
            self._finish(send, "ok", "")
        elif send.closing and not self._computing and not send.all_ready:
            # The owner broke its word; better one failed transfer than a peer that waits for ever.
            self._finish(send, "failed", "closed before the KV of all its tokens was ready")

    def _finish(self, send: Send, outcome: Outcome, reason: str) -> None:
        self._forget_chunks(send)
        del self._sends[send.transfer_id]
        lane = self._lanes.get(send.peer)
        if lane is not None:
            del lane.sends[send.transfer_id]
        self._report(send, outcome, reason)

    def _forget_chunks(self, send: Send) -> None:
        for chunk_id in send.chunks:
            del self._send_of_chunk[chunk_id]
        send.chunks.clear()

    def _report(self, send: Send, outcome: Outcome, reason: str) -> None:
        self._emit(
            SendFinished(
                transfer_id=send.transfer_id,
                peer=send.peer,
                outcome=outcome,
                messages=send.messages,
                bytes=send.bytes,
                compute_ended_ago=self._clock() - send.last_ready,
                transfer_seconds=max(0.0, send.last_done - send.first_queued),
                reason=reason,
            )
        )
