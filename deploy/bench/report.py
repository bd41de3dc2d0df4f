"""Turns outcomes into figures: percentiles of TTFT, ITL, TPOT and end-to-end time, rates, errors; and tables.

TTFT: from sending to the first piece of text. ITL: between two pieces. TPOT: from first to last piece, per token after
the first. E2E: from sending to the end. Only requests without an error count, except in `errors`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from deploy.bench.client import Outcome
from deploy.figures import short, table

MILLISECONDS = 1000.0
PERCENTILES = (50, 95, 99)
_TIMES = {"TTFT": "ttft_ms", "ITL": "itl_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms"}


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


def report_text(levels: Sequence[Mapping[str, Any]]) -> str:
    """The figures of all levels for people, at most 100 columns wide: rates, times, and errors by kind if any."""
    errors = "\n".join(_error_lines(levels))
    parts = (table(_rates(levels), words=1), table(_times(levels), words=2), errors)
    return "\n\n".join(part for part in parts if part)


def _rates(levels: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    yield ("load", "ok", "errors", "requests/s", "output tok/s", "total tok/s", "cached tok", "hidden transfer")
    for level in levels:
        share = level["server"].get("transfer_hidden_share")
        yield (
            level["load"],
            str(level["completed"]),
            str(sum(level["errors"].values())),
            *(short(level[name]) for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")),
            str(level["cached_tokens"]),
            "-" if share is None else f"{share:.0%}",
        )


def _times(levels: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    yield ("load", "times in ms", "mean", *(f"p{percent}" for percent in PERCENTILES))
    for level in levels:
        for number, (title, name) in enumerate(_TIMES.items()):
            figures = level[name]
            columns = ("mean", *(f"p{percent}" for percent in PERCENTILES))
            cells = [short(figures[column]) if figures else "-" for column in columns]
            yield (level["load"] if number == 0 else "", title, *cells)


def _error_lines(levels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for level in levels:
        for kind, count in sorted(level["errors"].items()):
            yield f"errors at {level['load']}: {count} x {kind}"
