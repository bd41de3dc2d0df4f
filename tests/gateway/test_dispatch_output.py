"""What one request's reader gets: contiguous, without repeats; and what a worker sends late is nobody's fault."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.pb.tandem.v1 import decode_pb2 as pb
from gateway.dispatch.output import Output

TOKENS = list(range(100, 112))


def output() -> Output:
    return Output(2, on_cancel_choice=lambda choice: None, on_close=lambda: None)


def delta(first: int, end: int, choice: int = 0) -> pb.Delta:
    return pb.Delta(choice=choice, first_index=first, token_ids=TOKENS[first:end])


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, int]]:
    """TOKENS in pieces without gaps; some begin again before the end of the one before, as after a fail-over."""
    ends = sorted({*draw(st.lists(st.integers(0, len(TOKENS)), max_size=6)), len(TOKENS)})
    return [(max(0, start - draw(st.integers(0, 3))), end) for start, end in pairwise([0, *ends])]


@given(pieces(), st.none() | st.integers(0, 5))
async def test_no_gap_is_seen_where_there_is_none(given: list[tuple[int, int]], cancelled_at: int | None) -> None:
    """Whenever the choice was cancelled: the worker hears of it later, and goes on meanwhile."""
    out = output()
    for number, (first, end) in enumerate(given):
        if number == cancelled_at:
            out.cancel_choice(0)
        assert out.put(delta(first, end)), f"{first}..{end} of {given}"
    if cancelled_at is None or cancelled_at >= len(given):
        assert out.output_ids[0] == TOKENS


async def test_gaps_and_unknown_choices_are_seen() -> None:
    out = output()
    assert out.put(delta(0, 2))
    assert not out.put(delta(3, 4))
    assert not out.put(delta(0, 1, choice=2))
    assert not out.put(delta(1, 2, choice=1))
