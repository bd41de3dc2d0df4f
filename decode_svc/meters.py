"""What a decode engine counts and measures. Knows no request; of a step only what was computed and how long it took."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from common.engine.block_pool import BlockPool
from common.engine.scheduling import SpeedMeter, StepPacer
from decode_svc.request import Figures, Snapshot
from decode_svc.scheduler import DecodeScheduler, Work


class Meters:
    """Figures since start, speeds, and the pacer that learns from each step."""

    def __init__(self, pacer: StepPacer) -> None:
        self.figures = Figures()
        self._pacer = pacer
        self._prefill_speed = SpeedMeter()
        self._decode_speed = SpeedMeter()

    def record_step(self, work: Seq[Work], seconds: float) -> None:
        total = sum(item.end - item.start for item in work)
        decoded = sum(1 for item in work if not item.sequence.is_prompt and item.end - item.start == 1)
        context = sum((item.end - item.start) * (item.start + item.end) // 2 for item in work) // total
        self._pacer.record(total, seconds, context)
        if decoded == total:
            self._decode_speed.record(decoded, seconds)
        else:
            self._prefill_speed.record(total - decoded, seconds)
        self.figures.tokens_decoded += decoded
        self.figures.tokens_filled += total - decoded
        self.figures.steps += 1
        self.figures.busy_seconds += seconds

    def snapshot(self, pool: BlockPool, scheduler: DecodeScheduler, *, transfers: int) -> Snapshot:
        """The engine's state now; `transfers` are under way."""
        counts = pool.counts()
        return Snapshot(
            free=counts.free,
            cached=counts.cached,
            owned=counts.owned,
            running=scheduler.num_running + scheduler.num_remote,
            waiting=scheduler.num_waiting,
            queued_tokens=scheduler.queued_tokens,
            transfers=transfers,
            prefill_tokens_per_second=self._prefill_speed.rate(),
            decode_tokens_per_second=self._decode_speed.rate(),
            preemptions=scheduler.num_preemptions,
            figures=replace(self.figures),
        )
