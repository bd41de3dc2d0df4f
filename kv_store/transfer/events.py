"""What a transfer tells its owner. Delivered on the transfer thread: handlers must be quick and must not raise."""

from dataclasses import dataclass
from typing import Literal

from kv_store.staging import SlotGrant

Outcome = Literal["ok", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Exactly one per opened send: its source pages are read no more.

    Unless the peer was disconnected or lost, no write of the transfer is under way any more either, so that a
    Terminal may be sent now.
    """

    transfer_id: int
    peer: str
    outcome: Outcome
    #: What was written whole; with outcome "ok" these seal the transfer.
    messages: int
    bytes: int
    #: Seconds since the last layer of the last chunk was ready: the tail that compute did not hide.
    compute_ended_ago: float
    #: Seconds from the first write queued to the last one done; 0 when nothing was sent.
    transfer_seconds: float
    #: Why, unless "ok".
    reason: str


@dataclass(frozen=True, slots=True)
class ReceiveFinished:
    """Exactly one per opened receive: its pages are written no more. "ok": sealed, and everything landed once."""

    transfer_id: int
    peer: str
    outcome: Outcome
    messages: int
    bytes: int
    reason: str
    #: time.monotonic() of the last scatter; 0 when nothing landed.
    last_landed: float
    #: Seconds by which the last message landed after the seal; 0 when all was there before it.
    landed_after_seal: float


@dataclass(frozen=True, slots=True)
class CreditsReady:
    """Staging slots of this side that `peer` may now write into; to be sent to it."""

    peer: str
    grants: tuple[SlotGrant, ...]


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The transport says that `peer` is gone; its transfers have failed. `connect` may pair it anew."""

    peer: str
    reason: str


TransferEvent = SendFinished | ReceiveFinished | CreditsReady | PeerLost
