"""Which jobs have run out of time: their own, their grammar's, or that of a prefill worker that has fallen silent.

Ends none itself.
"""

import math
from collections.abc import Callable, Iterable

from decode_svc.request import Job

#: Processor time that a job may spend on following its grammar, in seconds: at first, and with each output token. Usual
#: grammars take some 0.00002 s a token. A step waits for a moment only (`STEP_SECONDS`), but jobs whose grammars are
#: dear wait for one another.
GRAMMAR_SECONDS = 1.0
GRAMMAR_SECONDS_PER_TOKEN = 0.02


class TimeLimits:
    """A job that is ending already has no limit: it waits for its transfer, which always ends."""

    def __init__(self, *, prefill_timeout: float, clock: Callable[[], float]) -> None:
        """`prefill_timeout`: seconds without a sign of life after which a prefill worker is given up."""
        self._prefill_timeout = prefill_timeout
        self._clock = clock

    def seconds_left(self, jobs: Iterable[Job]) -> float | None:
        """Until the first of `jobs` runs out; None: none of them does."""
        limits = [limit for job in jobs if (limit := self._limit_of(job)) is not None]
        return max(0.0, min(limits) - self._clock()) if limits else None

    def expired(self, jobs: Iterable[Job]) -> list[Job]:
        now = self._clock()
        return [job for job in jobs if (limit := self._limit_of(job)) is not None and limit <= now]

    def is_overdue(self, job: Job) -> bool:
        """It is the job's own time that has run out."""
        return job.deadline is not None and job.deadline <= self._clock()

    def overruns_grammar(self, job: Job) -> bool:
        """Following its grammar has taken more than it may."""
        return job.grammar_seconds > GRAMMAR_SECONDS + GRAMMAR_SECONDS_PER_TOKEN * job.grammar_tokens

    def _limit_of(self, job: Job) -> float | None:
        if job.ending is not None:
            return None
        if self.overruns_grammar(job):
            return -math.inf
        transfer = job.transfer
        silent = None
        if transfer is not None and not transfer.abandoned:
            silent = transfer.heard + self._prefill_timeout
        return min((limit for limit in (job.deadline, silent) if limit is not None), default=None)
