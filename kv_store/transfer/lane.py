"""What the sender knows of one peer: its staging region, the credits it gave, and the writes towards it."""

from dataclasses import dataclass, field

from kv_store.staging import SlotGrant
from kv_store.transfer.chunk import OutgoingChunk
from kv_store.transport.base import WriteHandle, WriteState


@dataclass(slots=True)
class Send:
    """One transfer on its way out."""

    transfer_id: int
    peer: str
    first_token: int
    num_prompt_tokens: int
    #: By chunk id, in the order they were begun.
    chunks: dict[int, OutgoingChunk] = field(default_factory=dict)
    tokens_begun: int = 0
    closing: bool = False
    aborting: bool = False
    writes_in_flight: int = 0
    #: Running number of the next message.
    sequence: int = 0
    messages: int = 0
    bytes: int = 0
    #: Monotonic times; 0 until they happen.
    last_ready: float = 0.0
    first_queued: float = 0.0
    last_done: float = 0.0

    @property
    def all_ready(self) -> bool:
        """All tokens have been begun, and all their layers are ready."""
        begun = self.tokens_begun == self.num_prompt_tokens - self.first_token
        return begun and all(chunk.all_ready for chunk in self.chunks.values())

    @property
    def sent_all(self) -> bool:
        return self.all_ready and not self.chunks


@dataclass(slots=True)
class Write:
    """One message that the transport is moving."""

    handle: WriteHandle
    #: Send buffer that it reads from.
    buffer: int
    num_bytes: int
    #: None once the transfer it belonged to has ended.
    send: Send | None


@dataclass(slots=True)
class Lane:
    """One peer. `agent` is its name in the transport; its slots are `slot_bytes` long."""

    peer: str
    agent: str
    slot_bytes: int
    num_slots: int
    #: Last granted, first used: the peer has just read that slot, so its memory is still in the caches.
    credits: list[SlotGrant] = field(default_factory=list)
    sends: dict[int, Send] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)

    def ended_writes(self) -> list[Write]:
        """Take out the writes that are over, each released."""
        ended = [write for write in self.writes if write.handle.state() is not WriteState.PENDING]
        if ended:
            self.writes = [write for write in self.writes if write not in ended]
        return ended
