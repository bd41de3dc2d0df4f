"""What the gateway knows of one worker at one moment. Values only."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from common.manifest import WIRE_VERSION_MAX, WIRE_VERSION_MIN
from common.pb.tandem.v1 import worker_pb2 as pb

WorkerRole = Literal["prefill", "decode"]

_STATE_NAMES = {
    pb.WORKER_STATE_UNSPECIFIED: "unknown",
    pb.WORKER_STATE_STARTING: "starting",
    pb.WORKER_STATE_READY: "ready",
    pb.WORKER_STATE_DRAINING: "draining",
}
_ROLES: dict[pb.Role, WorkerRole] = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}


class Link(Enum):
    """How the gateway stands with a worker."""

    #: Not (or no longer) connected; tried again and again.
    LOST = "lost"
    #: Its Watch stream is open.
    LIVE = "live"
    #: Connected, but it does not fit: wrong model, role or protocol.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a worker must be to serve behind this gateway."""

    model: str
    #: Digest over tokenizer and chat template; empty: not compared.
    tokenizer_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as last heard of. Replaced, never changed."""

    address: str
    #: The role it was announced or configured with.
    role: WorkerRole
    link: Link = Link.LOST
    #: Why the link is lost or refused, in words.
    reason: str = ""
    status: pb.WorkerStatus | None = None
    manifest: pb.Manifest | None = None
    #: time.monotonic() when `status` came.
    received_at: float = 0.0

    @property
    def worker_id(self) -> str:
        """The worker's own id; its address until it has told."""
        return self.status.worker_id if self.status is not None else self.address

    @property
    def incarnation(self) -> str:
        return self.status.incarnation if self.status is not None else ""

    @property
    def routable(self) -> bool:
        """New work may be sent to it."""
        return self.link is Link.LIVE and self.status is not None and self.status.state == pb.WORKER_STATE_READY

    @property
    def state(self) -> str:
        """One word for people: starting, ready, draining, lost or refused."""
        if self.link is not Link.LIVE or self.status is None:
            return self.link.value
        # A later version may know more states.
        return _STATE_NAMES.get(self.status.state, "unknown")


def mismatch(expected: Expectation, role: WorkerRole, manifest: pb.Manifest, status: pb.WorkerStatus) -> str:
    """What keeps this worker from serving here, naming the field and both values; empty if it fits."""
    found = _ROLES.get(status.role, "unknown")
    tokenizer = expected.tokenizer_fingerprint
    wire = (manifest.wire_version_min, manifest.wire_version_max)
    if found != role:
        return f"role: {role!r} expected at this address, it is {found!r}"
    if manifest.model != expected.model:
        return f"model: {expected.model!r} here, {manifest.model!r} there"
    if tokenizer and manifest.tokenizer_fingerprint != tokenizer:
        return f"tokenizer_fingerprint: {tokenizer!r} here, {manifest.tokenizer_fingerprint!r} there"
    if wire[0] > WIRE_VERSION_MAX or wire[1] < WIRE_VERSION_MIN:
        return f"wire version: {WIRE_VERSION_MIN} to {WIRE_VERSION_MAX} here, {wire[0]} to {wire[1]} there"
    return ""
