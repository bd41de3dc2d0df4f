"""How much one grammar may take to compile."""

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Bounds of one job, counted on its own: what it spends waiting for its turn counts for nothing.

    Attributes:
        cpu_seconds: compute time. Counted on the processor, so that a busy machine refuses nothing.
        wall_seconds: time on the clock while it has its turn, where the machine is so busy that the above is never
            reached.
        memory_bytes: address space beyond that of the empty compiler.
        output_bytes: length of the serialized grammar.
        mask_seconds: compute time that the mask of one token may take, on the average of a few.
        slice_seconds: compute time after which a job that is not done lets new ones pass; see `Turns`. Usual grammars
            take a fraction of it.
        max_kept: jobs that may have used it up and keep what they have done: each may hold `memory_bytes`.
        max_heavy: jobs that may have used it up and wait for their turn, or for room to begin anew.
    """

    cpu_seconds: float = 2.0
    wall_seconds: float = 20.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 8 << 20
    mask_seconds: float = 0.02
    slice_seconds: float = 0.1
    max_kept: int = 4
    max_heavy: int = 32

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return cls(**json.loads(text))
