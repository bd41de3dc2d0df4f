"""Figures for people: numbers of about three digits, and plain tables that are cut nowhere."""

import math
from collections.abc import Iterable, Sequence


def short(value: float) -> str:
    """`19400`, `194`, `19.4`, `1.94`, `0.194`, `0.0019`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    if 0 < abs(value) < 0.1:
        digits = 4
    return f"{value:.{digits}f}"


def table(rows: Iterable[Sequence[str]], words: int) -> str:
    """Columns as wide as they must be, the first row as their headings; the first `words` to the left, numbers right.

    It does not ask how wide the terminal is: a pipe has no width, and a cell that was cut is of no use.
    """
    heading, *body = rows
    widths = [max(len(row[column]) for row in (heading, *body)) for column in range(len(heading))]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.ljust(width) if n < words else c.rjust(width) for n, (c, width) in cells).rstrip()

    return "\n".join([line(heading), "  ".join("-" * width for width in widths), *map(line, body)])
