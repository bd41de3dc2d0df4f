"""What an engine counts and measures, alike for prefill and decode.

Knows no request; of a step only which positions were computed and how long it took.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.engine.block_pool import BlockPool
from common.engine.scheduling import SpeedMeter, StepPacer


@dataclass(slots=True)
class Figures:
    """Counts since start."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    #: Tokens of prompts, and of output that is computed once more.
    tokens_computed: int = 0
    tokens_cached: int = 0
    #: Output tokens.
    tokens_decoded: int = 0
    steps: int = 0
    busy_seconds: float = 0.0

    def count_end(self, *, ok: bool, cancelled: bool) -> None:
        """One request has ended: well, cancelled, or else failed."""
        if ok:
            self.finished += 1
        elif cancelled:
            self.cancelled += 1
        else:
            self.failed += 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of an engine after its last step or command."""

    #: Blocks.
    free: int
    cached: int
    owned: int
    #: Requests with and without blocks.
    running: int
    waiting: int
    #: Tokens that are known and not yet computed.
    queued_tokens: int
    #: KV transfers under way.
    transfers: int
    preemptions: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    figures: Figures = field(default_factory=Figures)

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and self.waiting == 0


class Meters:
    """Figures since start, speeds, and the pacer that learns from each step."""

    def __init__(self, pacer: StepPacer) -> None:
        self.figures = Figures()
        self._pacer = pacer
        self._prefill_speed = SpeedMeter()
        self._decode_speed = SpeedMeter()

    def record_step(
        self, spans: Sequence[tuple[int, int]], *, decoded: int, seconds: float, postponed: int = 0
    ) -> None:
        """A step computed positions [start, end) of one sequence for each span.

        Args:
            decoded: of them all, each the one new token of a sequence that decodes.
            postponed: of them all, to be computed again because what they are for could not be done. They are counted
                then, and say nothing of how fast others are.
        """
        total = sum(end - start for start, end in spans)
        context = sum((end - start) * (start + end) // 2 for start, end in spans) // total
        self._pacer.record(total, seconds, context)
        prefilled = total - decoded - postponed
        if prefilled:
            self._prefill_speed.record(prefilled, seconds)
        elif decoded:
            self._decode_speed.record(decoded, seconds)
        self.figures.tokens_decoded += decoded
        self.figures.tokens_computed += prefilled
        self.figures.steps += 1
        self.figures.busy_seconds += seconds

    def snapshot(
        self, pool: BlockPool, *, running: int, waiting: int, queued_tokens: int, transfers: int, preemptions: int = 0
    ) -> Snapshot:
        """The engine's state now; what is not measured here is the caller's to say."""
        counts = pool.counts()
        return Snapshot(
            free=counts.free,
            cached=counts.cached,
            owned=counts.owned,
            running=running,
            waiting=waiting,
            queued_tokens=queued_tokens,
            transfers=transfers,
            preemptions=preemptions,
            prefill_tokens_per_second=self._prefill_speed.rate(),
            decode_tokens_per_second=self._decode_speed.rate(),
            figures=replace(self.figures),
        )
