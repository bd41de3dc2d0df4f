"""Which tokens of a prompt something has happened to, counted once each. Knows no request."""


class TokenRanges:
    """Ranges of positions, which may overlap and come in any order."""

    def __init__(self) -> None:
        #: Disjoint, in order, none touching the next.
        self._ranges: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        """Positions [start, end); none if that is empty."""
        if start >= end:
            return
        apart = []
        for other_start, other_end in self._ranges:
            if other_end < start or end < other_start:
                apart.append((other_start, other_end))
            else:
                start, end = min(start, other_start), max(end, other_end)
        self._ranges = sorted([*apart, (start, end)])

    @property
    def count(self) -> int:
        return sum(end - start for start, end in self._ranges)
