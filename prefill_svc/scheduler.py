"""Prefill policy: which prompts get blocks, and which of their tokens the next step computes.

First come, first served. A prompt is admitted only when it fits whole, and is never preempted once started; its
blocks come back when its KV has been sent. No tensors here.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.engine.scheduling import TokenBudget
from prefill_svc.request import PrefillJob


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one prompt: positions [start, end)."""

    job: PrefillJob
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.job.num_prompt_tokens


class PrefillScheduler:
    """Jobs go waiting → running (they have blocks) → sending (all computed) → gone."""

    def __init__(self, *, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._waiting: deque[PrefillJob] = deque()
        self._running: list[PrefillJob] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Sequence[PrefillJob]:
        """Jobs without blocks, in order."""
        return tuple(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(job.num_remaining for job in (*self._running, *self._waiting))

    @property
    def context_tokens(self) -> int:
        """Tokens that the prompt whose turn it is has behind it; its next ones attend to them."""
        return self._running[0].table.num_computed if self._running else 0

    def add(self, job: PrefillJob) -> None:
        self._waiting.append(job)

    def remove(self, job: PrefillJob) -> None:
        """Forget a job wherever it is; its table stays the caller's to release."""
        if job in self._running:
            self._running.remove(job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def admit(self) -> Iterable[PrefillJob]:
        """Start waiting jobs, in order, as long as the next one fits whole; yields each with its blocks reserved."""
        while self._waiting and len(self._running) < self._max_batch_size:
            job = self._waiting[0]
            if job.reads_cache:
                job.table.adopt_prefix(job.request.prompt_ids, job.hashes)
            if not job.table.reserve(job.num_prompt_tokens):
                job.table.release()
                return
            self._waiting.popleft()
            self._running.append(job)
            yield job

    def next_chunks(self, budget: TokenBudget) -> list[Chunk]:
        """Split the budget over the running jobs, oldest first."""
        chunks = []
        for job in self._running:
            count = budget.take(job.num_remaining)
            if count == 0:
                break
            start = job.table.num_computed
            chunks.append(Chunk(job, start, start + count))
        return chunks
