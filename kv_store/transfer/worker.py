"""The transfer thread of a worker: sends and receives KV for either role, beside the engine and never in its way.

Everything public but `start` and `close` may be called from any thread and returns at once: it is posted to the
thread, which runs the `TransferMachine`. Nothing of the machine's state is touched elsewhere.

Pairing order, which the slots' safety rests on: a side answers a peer's Hello only when its own `connect` for that
peer has resolved, because that is when its writes of any earlier pairing have ended.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from common.pb.tandem.v1.transport_pb2 import TransportPeer
from kv_store.layout import as_slots
from kv_store.staging import SlotGrant
from kv_store.transfer.counters import TransferCounters
from kv_store.transfer.events import TransferEvent
from kv_store.transfer.machine import TransferMachine
from kv_store.transfer.pacing import Alarm, Pace
from kv_store.transport.base import Transport

logger = logging.getLogger(__name__)

#: How long `close` waits for writes that are under way.
CLOSE_SECONDS = 1.0
#: How old the counters may be when nothing seems to have changed.
COUNTERS_SECONDS = 0.1


class KVTransfer:
    """See the module. Events come on the transfer thread, through `on_event`, which must be quick and not raise."""

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
        on_event: Callable[[TransferEvent], None],
        on_failure: Callable[[BaseException], None],
        device: torch.device | None = None,
        seal_timeout: float = 10.0,
    ) -> None:
        """Register memory for `staging_slots` incoming and `send_buffers` outgoing messages of `slot_bytes` each.

        Args:
            transport: used by nobody else from now on; `close` closes it.
            pages: the worker's KV, [num_layers, 2, num_blocks, block_size, kv_heads, head_dim].
            incarnation: names this side in headers; what peers call `peer`.
            checksum: whether outgoing messages carry one (incoming ones are checked whenever they do).
            on_failure: called once, on the thread, with the broken invariant that ends it, after all open transfers
                have failed. The worker must go down with it. Not called for `close`.
            device: where staging and send buffers live; that of `pages` if not given.
            seal_timeout: seconds without progress after which a sealed, incomplete receive fails.
        """
        self._clock = time.monotonic
        self._machine = TransferMachine(
            transport=transport,
            pages=pages,
            staging_slots=staging_slots,
            slot_bytes=slot_bytes,
            send_buffers=send_buffers,
            incarnation=incarnation,
            checksum=checksum,
            emit=on_event,
            clock=self._clock,
            device=pages.device if device is None else device,
            seal_timeout=seal_timeout,
        )
        self._num_layers = pages.shape[0]
        self._pace = Pace()
        self._commands: deque[Callable[[], None]] = deque()
        self._chunk_ids = itertools.count()
        self._alarm = Alarm()
        self._stopping = False
        #: Guards `_ended` against a command that is posted while the thread ends.
        self._end_lock = threading.Lock()
        self._ended = False
        self._on_failure = on_failure
        self._failure: BaseException | None = None
        self._counters = self._machine.count()
        self._counted_at = self._clock()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    # --- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread and the transport; transfers that are open fail. Idempotent."""
        self._stopping = True
        self._alarm.ring()
        if self._thread.is_alive():
            self._thread.join()

    def local_peer(self) -> TransportPeer:
        """What the other side of a pair needs to know of this one."""
        return self._machine.local_peer()

    def counters(self) -> TransferCounters:
        """As of one of the thread's last rounds, a moment ago."""
        return self._counters

    # --- peers ---------------------------------------------------------------------------------------

    def connect(self, peer: str, info: TransportPeer, *, receive: bool) -> "Future[None]":
        """Pair with the incarnation `peer`; `receive`: grant it staging slots (CreditsReady follows).

        The future fails with ValueError where the two sides' transports do not fit (the message names the field),
        and with PeerUnreachable. A peer that is connected already is paired anew: its transfers fail.
        """
        paired: Future[None] = Future()
        self._post_or_raise(partial(self._machine.pairing.connect, peer, info, receive, paired))
        return paired

    def disconnect(self, peer: str) -> None:
        """The pair's stream has closed: open transfers with `peer` fail, its slots wait for proof of its end."""
        self._post(partial(self._machine.pairing.disconnect, peer, "the pair was disconnected"))

    def prove_dead(self, peer: str) -> None:
        """The process of `peer` is known to be dead; its quarantined slots are freed shortly."""
        self._post(partial(self._machine.pairing.prove_dead, peer))

    def add_credits(self, peer: str, grants: Sequence[SlotGrant]) -> None:
        """`peer` lets this side write into those slots of its own, once each."""
        self._post(partial(self._machine.sender.add_credits, peer, tuple(grants)))

    # --- sending -------------------------------------------------------------------------------------

    def open_send(self, transfer_id: int, peer: str, num_prompt_tokens: int, first_token: int) -> None:
        """Tokens [first_token, num_prompt_tokens) of a prompt will be sent to `peer`, under the receiver's id.

        Ids must be unique over all receivers (draw them at random): one that is in use fails at once.
        """
        self._post_or_raise(partial(self._machine.sender.open, transfer_id, peer, num_prompt_tokens, first_token))

    def begin_chunk(self, transfer_id: int, first_token: int, slots: Sequence[int]) -> int:
        """The KV of tokens [first_token, +len(slots)) will become ready layer by layer; returns the chunk's id.

        Chunks follow each other without gaps. `slots` are flat slots of this worker's pages.
        """
        chunk_id = next(self._chunk_ids)
        self._post(partial(self._machine.sender.begin_chunk, transfer_id, chunk_id, first_token, as_slots(slots)))
        return chunk_id

    def layers_ready(
        self, chunk_ids: Sequence[int], num_layers_done: int, event: torch.cuda.Event | None = None
    ) -> None:
        """The KV of layers [0, num_layers_done) of those chunks is final (once `event` has happened, if given)."""
        command = partial(self._machine.sender.layers_ready, chunk_ids, num_layers_done, event, self._clock())
        # While sends are open the thread looks every few milliseconds; only the end of compute is worth a wake-up.
        self._post(command, wake=num_layers_done == self._num_layers)

    def close_send(self, transfer_id: int) -> None:
        """All chunks are begun and ready; SendFinished follows the last write."""
        self._post(partial(self._machine.sender.close, transfer_id))

    def abort_send(self, transfer_id: int) -> None:
        """Send no more of it; SendFinished follows when no write is under way. Unknown ids are ignored."""
        self._post(partial(self._machine.sender.abort, transfer_id))

    # --- receiving -----------------------------------------------------------------------------------

    def can_receive_from(self, peer: str) -> bool:
        """Whether `peer` (paired with `receive`) has a staging slot to write into, or can be granted one, as of now.

        If not, all slots are granted to others or quarantined, and a receive from it would wait for them.
        """
        return not self._ended and peer in self._machine.receiver.writers

    def open_receive(self, transfer_id: int, peer: str, first_token: int, slots: Sequence[int]) -> None:
        """The KV of tokens [first_token, +len(slots)) is to come from `peer` and goes to those flat slots."""
        checked = self._machine.copier.check_slots(as_slots(slots))
        self._post_or_raise(partial(self._machine.receiver.open, transfer_id, peer, first_token, checked))

    def seal(self, transfer_id: int, messages: int, num_bytes: int) -> None:
        """The sender says that it wrote this much (its Terminal)."""
        self._post(partial(self._machine.receiver.seal, transfer_id, messages, num_bytes))

    def abort_receive(self, transfer_id: int) -> None:
        """ReceiveFinished follows at once; messages that still come are dropped. Unknown ids are ignored."""
        self._post(partial(self._machine.receiver.abort, transfer_id))

    # --- the thread ----------------------------------------------------------------------------------

    def _post(self, command: Callable[[], None], wake: bool = True) -> None:
        """Have the thread run `command`; without effect once it has ended."""
        self._commands.append(command)
        if wake:
            self._alarm.ring()

    def _post_or_raise(self, command: Callable[[], None]) -> None:
        """For commands that are owed an event, which nobody would send once the thread has ended."""
        with self._end_lock:
            if self._ended:
                raise RuntimeError("the transfer thread has ended") from self._failure
            self._post(command)

    def _run(self) -> None:
        try:
            self._machine.enter_thread()
            while not self._stopping:
                self._round()
            self._refuse_transfers()
            self._run_commands()
            self._finish("the worker is closing", CLOSE_SECONDS)
        except BaseException as failure:
            logger.critical("the transfer thread failed", exc_info=True)
            self._fail(failure)

    def _round(self) -> None:
        commands = self._run_commands()
        busy = self._machine.round() or commands > 0
        delay = self._pace.delay(busy=busy, polling=self._machine.wants_polling, paired=self._machine.is_paired)
        # Before an endless sleep too: nobody would count what this round changed (slots out of quarantine).
        self._refresh_counters(busy or delay is None)
        self._alarm.sleep(delay)

    def _refresh_counters(self, changed: bool) -> None:
        now = self._clock()
        if changed or now - self._counted_at > COUNTERS_SECONDS:
            self._counters = self._machine.count()
            self._counted_at = now

    def _run_commands(self) -> int:
        count = len(self._commands)
        for _ in range(count):
            self._commands.popleft()()
        return count

    def _refuse_transfers(self) -> None:
        with self._end_lock:
            self._ended = True

    def _finish(self, reason: str, patience: float) -> None:
        """Fail what is open, so that every transfer has its one event."""
        self._machine.finish(reason, patience)
        self._counters = self._machine.count()

    def _fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._refuse_transfers()
        try:
            self._finish(f"the transfer thread failed: {failure!r}", 0.0)
        except BaseException:
            # What broke may not let the transfers end in order either; the worker goes down all the same.
            logger.critical("not all open transfers could be failed", exc_info=True)
        self._on_failure(failure)
