"""One chunk of a prompt on its way out: which of its layers are final, and when they are worth a message."""

from collections import deque

from kv_store.layout import KVShape, MessageRange, Slots, plan_messages

#: Below this many bytes the layers before the last one are not worth a message of their own.
TAIL_BYTES = 64 * 1024


class OutgoingChunk:
    """Layers become ready in order; `next_message` hands out what to send now.

    The rule: layers wait until they fill a message, because each message has a price; but what is ready when only
    the last layer is still being computed goes at once, so that after the end of compute one layer is left to send.
    """

    def __init__(self, shape: KVShape, first_token: int, slots: Slots, *, slot_bytes: int, ends_prompt: bool) -> None:
        self.first_token = first_token
        #: Flat slot of each token, int64 [t].
        self.slots = slots
        self._shape = shape
        self._slot_bytes = slot_bytes
        self._ends_prompt = ends_prompt
        self._layer_bytes = shape.message_bytes(1, len(slots))
        #: Layers that fit one message; 0 when not even one does.
        self._group = slot_bytes // self._layer_bytes
        self._ready = 0
        self._planned = 0
        self._cuts: deque[MessageRange] = deque()

    def set_ready(self, num_layers: int) -> None:
        """Layers [0, num_layers) are final. Never goes back."""
        assert num_layers <= self._shape.num_layers, f"{num_layers} layers of {self._shape.num_layers}"
        self._ready = max(self._ready, num_layers)

    @property
    def all_ready(self) -> bool:
        return self._ready == self._shape.num_layers

    @property
    def sent_whole(self) -> bool:
        """All layers are in messages that `next_message` has handed out."""
        return self._planned == self._shape.num_layers and not self._cuts

    def next_message(self) -> MessageRange | None:
        """Take the next message worth sending now; None if none is. To be called only when it can be sent at once.

        Deciding that late lets layers that became ready while credits were short travel together.
        """
        if not self._cuts:
            layers = self._due()
            if layers == 0:
                return None
            self._cuts.extend(plan_messages(self._shape, self._planned, layers, len(self.slots), self._slot_bytes))
            self._planned += layers
        return self._cuts.popleft()

    def _due(self) -> int:
        """How many of the layers that are ready and not planned yet should go now."""
        pending = self._ready - self._planned
        to_come = self._shape.num_layers - self._ready
        if to_come == 0:
            return pending
        if to_come == 1 and self._ends_prompt and pending * self._layer_bytes >= TAIL_BYTES:
            return pending
        return pending - pending % self._group if self._group else pending
