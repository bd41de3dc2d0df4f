"""Stop strings are found wherever the cuts fall, and nothing of them is shown."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text.stop_strings import StopChecker

ALPHABET = st.sampled_from("ab\n")
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def run(stops: Sequence[str], pieces: Sequence[str], *, include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, include_stop=include)
    shown = [checker.push(piece) for piece in pieces]
    if checker.hit is None:
        shown.append(checker.flush())
    return shown, checker.hit


def first_stop(stops: Sequence[str], text: str) -> tuple[int, str] | None:
    """By definition: the stop string that ends first, the longest of those."""
    hits = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return None
    end, length, stop = min(hits)
    return end + length, stop


@given(STOPS, st.lists(st.text(ALPHABET, max_size=5), max_size=8), st.booleans())
def test_equals_the_definition_for_any_cut(stops: list[str], pieces: list[str], include: bool) -> None:
    text = "".join(pieces)
    shown, hit = run(stops, pieces, include=include)
    expected = first_stop(stops, text)
    if expected is None:
        assert ("".join(shown), hit) == (text, None)
    else:
        start, stop = expected
        assert ("".join(shown), hit) == (text[:start] + (stop if include else ""), stop)


@given(STOPS, st.lists(st.text(ALPHABET, max_size=3), max_size=8))
def test_holds_back_no_more_than_needed(stops: list[str], pieces: list[str]) -> None:
    checker = StopChecker(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += checker.push(piece)
        if checker.hit is not None:
            return
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["say E", "N", "D now"], "say "),
        (["END"], ["say E", "N", "d"], "say ENd"),
        (["aab"], ["a", "a", "a", "b"], "a"),
        (["zzzz", "lo"], ["hel", "lo"], "hel"),
        (["\n\n"], ["a\n", "b\n", "\n"], "a\nb"),
        ([], ["any", "thing"], "anything"),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: str) -> None:
    assert "".join(run(stops, pieces)[0]) == shown


def test_nothing_follows_a_hit() -> None:
    checker = StopChecker(["x"])
    assert checker.push("axb") == "a"
    assert checker.push("more") == ""
    assert checker.flush() == ""
