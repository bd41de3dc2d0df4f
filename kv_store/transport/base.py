"""What the transfer thread needs from a transport: one-sided writes into registered memory, with a notification.

A transport is used from one thread only (the transfer thread); `deliver`-like entry points that other threads
need are a transport's own business. Nothing here blocks.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor


class WriteState(Enum):
    PENDING = "pending"
    #: The data lies in the peer's memory and its notification is on its way behind it.
    DONE = "done"
    #: The peer is gone or the write was refused; the memory it read from may be used again.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Notification:
    """What a peer sent along with a finished write into this side's staging region."""

    peer: str
    payload: bytes


class WriteHandle(Protocol):
    """One write under way; `release` is idempotent and allowed only when it is no longer pending."""

    def state(self) -> WriteState: ...

    def release(self) -> None: ...


class PeerUnreachable(Exception):
    """Metadata that cannot be used, or a peer whose process is gone."""


class Transport(Protocol):
    """Moves bytes from local registered memory into a peer's staging region."""

    #: "ucx" or "grpc".
    kind: str
    #: Unique name of this side.
    agent: str
    #: Whether `disconnect` also ends what the peer can still write here; if not, only its death proves that.
    revokes_on_disconnect: bool

    def register_staging(self, memory: Tensor) -> None:
        """Let peers write into `memory` (uint8, contiguous). Once, before `metadata`."""
        ...

    def register_source(self, memory: Tensor) -> None:
        """Allow writes out of `memory` (uint8, contiguous). Once."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs for `connect`. Any thread may ask."""
        ...

    def connect(self, peer: str, metadata: bytes, staging_base: int) -> None:
        """Make `peer` writable. Raises PeerUnreachable."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget `peer`; its pending writes fail. Unknown peers are ignored."""
        ...

    def write(self, peer: str, source_offset: int, offset: int, length: int, notification: bytes) -> WriteHandle:
        """Copy source[source_offset:+length] to the peer's staging[offset:+length], then notify it (never empty).

        Raises PeerUnreachable if the peer is not connected or is known to be gone.
        """
        ...

    def poll(self) -> list[Notification]:
        """Progress everything; return the notifications that came since the last call."""
        ...

    def close(self) -> None: ...
