"""Who a worker is."""

import os
import secrets
from dataclasses import dataclass
from typing import Literal

WorkerRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Attributes:
    worker_id: stable across restarts where the operator gives it (a pod's name); else drawn at start.
    incarnation: new at each start.
    """

    role: WorkerRole
    worker_id: str
    incarnation: str
    pid: int

    @classmethod
    def new(cls, role: WorkerRole, worker_id: str) -> "WorkerIdentity":
        """`worker_id` empty: one is drawn."""
        incarnation = secrets.token_hex(8)
        return cls(role, worker_id or f"{role}-{incarnation[:6]}", incarnation, os.getpid())
