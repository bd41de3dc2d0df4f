"""Turns outcomes into figures: percentiles of TTFT, ITL, TPOT and end-to-end time, rates, errors; and a table.

TTFT: from sending to the first piece of text. ITL: between two pieces. TPOT: from first to last piece, per token after
the first. E2E: from sending to the end. Only requests without an error count, except in `errors`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table

from deploy.bench.client import Outcome

MILLISECONDS = 1000.0
PERCENTILES = (50, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sorted, non-empty values lie; between two of them, in proportion."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    figures = {"mean": sum(ordered) / len(ordered)}
    figures |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {name: round(value * MILLISECONDS, 3) for name, value in figures.items()}


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All figures of one level of load, by name; JSON-ready."""
    good = [outcome for outcome in outcomes if not outcome.error]
    begun = min((outcome.sent_at for outcome in outcomes), default=0.0)
    duration = max((outcome.ended_at for outcome in outcomes), default=0.0) - begun
    output_tokens = sum(outcome.output_tokens for outcome in good)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "duration_s": round(duration, 3),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": _rate(output_tokens, duration),
        "total_tokens_per_s": _rate(prompt_tokens + output_tokens, duration),
        "requests_per_s": _rate(len(good), duration),
        "ttft_ms": distribution([outcome.piece_times[0] - outcome.sent_at for outcome in good]),
        "itl_ms": distribution([b - a for outcome in good for a, b in pairwise(outcome.piece_times)]),
        "tpot_ms": distribution([_time_per_token(outcome) for outcome in good if outcome.output_tokens > 1]),
        "e2e_ms": distribution([outcome.ended_at - outcome.sent_at for outcome in good]),
    }


def _rate(count: int, duration: float) -> float:
    return round(count / duration, 3) if duration > 0 else 0.0


def _time_per_token(outcome: Outcome) -> float:
    return (outcome.piece_times[-1] - outcome.piece_times[0]) / (outcome.output_tokens - 1)


def levels_table(levels: Sequence[Mapping[str, Any]]) -> Table:
    """One row per level of load. Times in milliseconds: p50 / p95 / p99."""
    table = Table(caption="times in ms: p50 / p95 / p99")
    for heading in ("load", "ok", "errors", "output tok/s", "TTFT", "ITL", "TPOT", "E2E", "hidden transfer"):
        table.add_column(heading, justify="left" if heading == "load" else "right", no_wrap=True)
    for level in levels:
        times = (_times(level[name]) for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"))
        counts = (str(level["completed"]), str(sum(level["errors"].values())), f"{level['output_tokens_per_s']:.1f}")
        share = level["server"].get("transfer_hidden_share")
        table.add_row(level["load"], *counts, *times, "-" if share is None else f"{share:.0%}")
    return table


def _times(figures: Mapping[str, float] | None) -> str:
    return " / ".join(f"{figures[f'p{percent}']:.3g}" for percent in PERCENTILES) if figures else "-"
