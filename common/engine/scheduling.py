"""Arithmetic that both schedulers share: token budgets, step pacing and measured speed.

No policy and no clock: times are passed in, so that everything here is a pure function of what it was told.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBudget:
    """Tokens that one engine step may still compute."""

    total: int
    remaining: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.total >= 0, f"budget of {self.total} tokens"
        self.remaining = self.total

    def take(self, wanted: int) -> int:
        """Grant up to `wanted` tokens; returns how many, possibly 0."""
        assert wanted >= 0, f"wanted {wanted} tokens"
        granted = min(wanted, self.remaining)
        self.remaining -= granted
        return granted


class StepPacer:
    """Chooses how many tokens a step may compute so that it stays under a target time.

    Learns `seconds = fixed + per_token * n * (1 + context / context_scale)` by exponentially weighted regression
    over (work, seconds). With steps of nearly one size the split between the two terms cannot be seen, and the
    regression leans towards `fixed = 0`, which is right near that size.
    """

    #: Weight of the newest step.
    _SMOOTHING = 0.2
    #: A step this many times longer or shorter than predicted counts as this many times only: one hiccup of the
    #: machine moves little, a lasting change is followed in a few steps.
    _OUTLIER = 3.0
    #: Budgets never exceed this multiple of the largest recent step: the line is not trusted far beyond its data.
    _GROWTH = 2.0
    #: How fast the largest recent step is forgotten.
    _FORGET = 0.98
    #: Relative spread of work below which the slope is taken from the origin.
    _SPREAD = 0.1
    _ROUND = 16

    def __init__(
        self,
        max_tokens: int,
        target_seconds: float,
        min_tokens: int = 16,
        start_tokens: int | None = None,
        *,
        context_scale: int = 4096,
    ) -> None:
        """`context_scale`: context length at which attention costs as much as the rest of a token's work."""
        assert 0 < min_tokens <= max_tokens, f"min_tokens {min_tokens}, max_tokens {max_tokens}"
        assert target_seconds > 0 and context_scale > 0, f"target {target_seconds} s, scale {context_scale}"
        self.target_seconds = target_seconds
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._context_scale = context_scale
        #: In tokens without context, like all work below.
        self._largest = float(start_tokens if start_tokens is not None else max_tokens) / self._GROWTH
        self._measured = False
        self._work = self._seconds = self._work_sq = self._work_seconds = 0.0

    def budget(self, context_tokens: int = 0) -> int:
        """Tokens for the next step, if they attend to about `context_tokens` each: between min and max_tokens,
        and above min a multiple of 16."""
        work = self._GROWTH * self._largest
        if self._measured:
            fixed, per_work = self._fit()
            work = min(work, (self.target_seconds - fixed) / per_work)
        tokens = int(min(work / self._work_per_token(context_tokens), self._max_tokens))
        return max(self._min_tokens, tokens - tokens % self._ROUND)

    def record(self, num_tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """Learn from a step of `num_tokens` tokens that attended to about `context_tokens` each.

        Steps below min_tokens are ignored: they are all fixed cost, and no budget would be that small.
        """
        assert seconds >= 0.0, f"a step of {seconds} s"
        if num_tokens < self._min_tokens:
            return
        work = num_tokens * self._work_per_token(context_tokens)
        self._largest = max(work, self._largest * self._FORGET)
        weight = self._SMOOTHING if self._measured else 1.0
        if self._measured:
            fixed, per_work = self._fit()
            expected = fixed + per_work * work
            seconds = min(max(seconds, expected / self._OUTLIER), expected * self._OUTLIER)
        # Never zero, or a clock too coarse for the step would promise infinite speed.
        self._fold(weight, work, max(seconds, 1e-9))
        self._measured = True

    def _work_per_token(self, context_tokens: int) -> float:
        return 1.0 + context_tokens / self._context_scale

    def _fold(self, weight: float, work: float, seconds: float) -> None:
        self._work += weight * (work - self._work)
        self._seconds += weight * (seconds - self._seconds)
        self._work_sq += weight * (work * work - self._work_sq)
        self._work_seconds += weight * (work * seconds - self._work_seconds)

    def _fit(self) -> tuple[float, float]:
        """(fixed seconds, seconds per unit of work), both >= 0 and the latter > 0."""
        ratio = self._seconds / self._work
        variance = max(self._work_sq - self._work * self._work, 0.0)
        covariance = self._work_seconds - self._work * self._seconds
        prior = (self._SPREAD * self._work) ** 2
        slope = (covariance + prior * ratio) / (variance + prior)
        slope = min(max(slope, 0.05 * ratio), ratio)
        return self._seconds - slope * self._work, slope


class SpeedMeter:
    """Tokens per second over the last `window_seconds` of *busy* time; idling neither dilutes nor ages it."""

    def __init__(self, window_seconds: float = 10.0) -> None:
        assert window_seconds > 0, f"window of {window_seconds} s"
        self._window_seconds = window_seconds
        self._samples: deque[tuple[int, float]] = deque()
        self._tokens = 0
        self._seconds = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """Add a busy span that produced `tokens` tokens."""
        assert tokens >= 0 and seconds >= 0.0, f"{tokens} tokens in {seconds} s"
        self._samples.append((tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds
        while len(self._samples) > 1 and self._seconds - self._samples[0][1] >= self._window_seconds:
            old_tokens, old_seconds = self._samples.popleft()
            self._tokens -= old_tokens
            self._seconds -= old_seconds

    def rate(self) -> float:
        """Tokens per second; 0 until something was measured."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0
