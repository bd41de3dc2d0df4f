"""How many prefill and decode workers the traffic of the last minutes wants. A formula; acts on nothing.

N_P = ceil(arrival rate x mean uncached prompt tokens / prefill tokens per second of one worker)
N_D = ceil(arrival rate x mean output tokens          / decode tokens per second of one worker)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.cluster.views import WorkerView
from gateway.planner.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Sizing:
    """The wanted numbers and what they come from. Speeds are of one worker; 0: not measured yet."""

    #: At least 1 each.
    wanted_prefill: int
    wanted_decode: int
    #: Prefill workers per decode worker, not rounded; None until both speeds are measured and traffic came.
    ratio: float | None
    traffic: Traffic
    prefill_speed: float
    decode_speed: float


def size(traffic: Traffic, prefill_speed: float, decode_speed: float) -> Sizing:
    """Apply the formula. Speeds: tokens per second of one worker, 0 if not measured."""
    prefill = _workers(traffic.arrival_rate * traffic.mean_uncached_tokens, prefill_speed)
    decode = _workers(traffic.arrival_rate * traffic.mean_output_tokens, decode_speed)
    return Sizing(
        max(1, math.ceil(prefill)),
        max(1, math.ceil(decode)),
        prefill / decode if prefill > 0 and decode > 0 else None,
        traffic,
        prefill_speed,
        decode_speed,
    )


def measured_speeds(workers: Iterable[WorkerView]) -> tuple[float, float]:
    """Mean prefill and decode speed of the workers that have measured theirs.

    Decode workers prefill too; their figure counts only where no prefill worker has one.
    """
    statuses = [(view.role, view.status) for view in workers if view.status is not None]
    prefill = [status.prefill_tokens_per_second for role, status in statuses if role == "prefill"]
    local = [status.prefill_tokens_per_second for role, status in statuses if role == "decode"]
    decode = [status.decode_tokens_per_second for role, status in statuses if role == "decode"]
    return _mean(prefill) or _mean(local), _mean(decode)


def _workers(tokens_per_second: float, speed: float) -> float:
    return tokens_per_second / speed if speed > 0 else 0.0


def _mean(speeds: Iterable[float]) -> float:
    measured = [speed for speed in speeds if speed > 0]
    return sum(measured) / len(measured) if measured else 0.0
