"""How much one grammar may take to compile."""

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Bounds of one job, counted from its own start.

    Attributes:
        cpu_seconds: compute time. Counted on the processor, so that a busy machine refuses nothing.
        wall_seconds: time on the clock, where the machine is so busy that the above is never reached.
        memory_bytes: address space beyond that of the empty compiler.
        output_bytes: length of the serialized grammar.
        mask_seconds: compute time that the mask of one token may take, on the average of a few.
    """

    cpu_seconds: float = 2.0
    wall_seconds: float = 20.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 8 << 20
    mask_seconds: float = 0.02

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return cls(**json.loads(text))
