"""What has come in and gone out over the last minutes, in buckets of a second. Knows no worker."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.generation import GenerationStats

WINDOW_SECONDS = 120
#: Transfers that the hidden share is taken over.
_RECENT_TRANSFERS = 256


@dataclass(slots=True)
class _Bucket:
    second: int
    arrivals: int = 0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    finished: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Means over the window."""

    #: Requests per second.
    arrival_rate: float
    #: Tokens of a request.
    mean_prompt_tokens: float
    mean_uncached_tokens: float
    mean_output_tokens: float


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """KV that went from prefill to decode workers for finished requests of this gateway."""

    requests: int
    bytes: int
    messages: int
    #: Over the recent transfers: the part of their time that compute hid, 0 to 1; None without a transfer.
    hidden_share: float | None
    #: From the first message queued to the landing of the last; and the part of it after compute had ended.
    seconds: float
    exposed_seconds: float


class TrafficWindow:
    """Counts requests as they come and end (a TrafficObserver)."""

    def __init__(self, window: int = WINDOW_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """`window`: seconds; `clock`: seconds that never go back."""
        self._window = window
        self._clock = clock
        self._started = clock()
        self._buckets: deque[_Bucket] = deque()
        self._transfers: deque[tuple[float, float]] = deque(maxlen=_RECENT_TRANSFERS)
        self._requests = self._bytes = self._messages = 0
        self._seconds = self._exposed_seconds = 0.0

    def arrived(self, prompt_tokens: int, uncached_tokens: int) -> None:
        bucket = self._now()
        bucket.arrivals += 1
        bucket.prompt_tokens += prompt_tokens
        bucket.uncached_tokens += uncached_tokens

    def finished(self, stats: GenerationStats) -> None:
        bucket = self._now()
        bucket.finished += 1
        bucket.output_tokens += stats.output_tokens
        seconds = float(stats.details["transfer_seconds"])
        if seconds > 0:
            self._requests += 1
            self._bytes += int(stats.details["transfer_bytes"])
            self._messages += int(stats.details["transfer_messages"])
            exposed = min(seconds, float(stats.details["transfer_exposed_seconds"]))
            self._seconds += seconds
            self._exposed_seconds += exposed
            self._transfers.append((seconds, exposed))

    @property
    def traffic(self) -> Traffic:
        """Means over the window, or over the time since start while that is shorter."""
        self._now()
        seconds = min(self._window, max(1.0, self._clock() - self._started))
        arrivals = sum(bucket.arrivals for bucket in self._buckets)
        finished = sum(bucket.finished for bucket in self._buckets)
        return Traffic(
            arrivals / seconds,
            sum(bucket.prompt_tokens for bucket in self._buckets) / max(1, arrivals),
            sum(bucket.uncached_tokens for bucket in self._buckets) / max(1, arrivals),
            sum(bucket.output_tokens for bucket in self._buckets) / max(1, finished),
        )

    @property
    def transfers(self) -> TransferTotals:
        total = sum(seconds for seconds, _ in self._transfers)
        exposed = sum(exposed for _, exposed in self._transfers)
        share = 1.0 - exposed / total if total > 0 else None
        counted = (self._requests, self._bytes, self._messages)
        return TransferTotals(*counted, share, self._seconds, self._exposed_seconds)

    def _now(self) -> _Bucket:
        second = int(self._clock())
        if not self._buckets or self._buckets[-1].second != second:
            self._buckets.append(_Bucket(second))
        while self._buckets[0].second <= second - self._window:
            self._buckets.popleft()
        return self._buckets[-1]
