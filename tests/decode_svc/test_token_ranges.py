"""Positions count once, in whatever ranges and order they come."""

from hypothesis import given
from hypothesis import strategies as st

from decode_svc.token_ranges import TokenRanges

ranges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)


@given(ranges)
def test_each_position_counts_once(given_ranges: list[tuple[int, int]]) -> None:
    counted, positions = TokenRanges(), set[int]()
    for start, end in given_ranges:
        counted.add(start, end)
        positions.update(range(start, end))
        assert counted.count == len(positions)
