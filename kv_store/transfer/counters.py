"""Counts of a transfer thread since its start, as one snapshot."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kv_store.staging import StagingCounts


class Drop(Enum):
    """Why a message that arrived was not used."""

    #: Its grant was used before, or it covers what has landed already.
    DUPLICATE = "duplicate"
    #: Its slot was granted anew since, or its transfer is over.
    LATE = "late"
    #: The header states another size than its ranges need.
    TRUNCATED = "truncated"
    #: From or for somebody else, or under a grant that was never given.
    FOREIGN = "foreign"
    #: An unreadable header, ranges outside of the transfer, or a wrong checksum.
    CORRUPT = "corrupt"


@dataclass(slots=True)
class ReceiverTotals:
    messages: int = 0
    bytes: int = 0
    dropped: Counter[Drop] = field(default_factory=Counter)


@dataclass(slots=True)
class SenderTotals:
    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class TransferCounters:
    messages_sent: int
    bytes_sent: int
    messages_received: int
    bytes_received: int
    #: By reason; every reason is present.
    dropped: dict[str, int]
    staging: StagingCounts
    send_buffers_in_use: int
    open_sends: int
    open_receives: int
    writes_in_flight: int
    peers: int
    #: Of `staging.quarantined`: those of processes that cannot be seen from here, as on other hosts. They stay until
    #: the same incarnation pairs anew or somebody vouches for its end, perhaps for ever.
    quarantined_out_of_sight: int = 0
