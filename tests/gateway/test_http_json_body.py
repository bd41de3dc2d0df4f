"""Answers as bytes: those of the standard library, whatever is in them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.json_body import JsonList, gathered, json_bytes, json_paced, json_pieces
from gateway.pace import PART, PART_BYTES
from tests.factories.turns import counted_turns

#: Characters alone: halves of surrogate pairs have no bytes.
_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
_VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner), max_leaves=10)


def library(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


@given(st.dictionaries(_TEXT, _VALUES))
def test_bytes_are_those_of_the_library(body: dict[str, object]) -> None:
    assert b"".join(json_pieces(body)) == library(body)


@given(st.lists(st.lists(_LEAVES | st.just({"a": [1]}), max_size=3), max_size=5))
def test_a_list_that_grows_is_a_list(parts: list[list[object]]) -> None:
    grown, whole = JsonList(), [item for part in parts for item in part]
    for part in parts:
        before, copy = len(grown_items(grown)), grown.copy()
        grown.extend(part)
        assert len(grown_items(copy)) == before
    assert b"".join(json_pieces({"x": [{"y": grown}, grown + grown]})) == library({"x": [{"y": whole}, whole + whole]})


def grown_items(grown: JsonList) -> list[object]:
    items: list[object] = json.loads(b"".join(json_pieces(grown)))
    return items


@pytest.mark.parametrize("item", [7, "x", None, [1], {"a": 1}])
@pytest.mark.parametrize("count", [PART - 1, PART, PART + 1, 3 * PART])
def test_long_lists(item: object, count: int) -> None:
    mixed = [*[item] * count, [], 1]
    assert b"".join(json_pieces({"x": mixed})) == library({"x": mixed})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("depth", [0, 3, 8, 20])
def test_what_json_cannot_hold_is_an_error(value: float, depth: int) -> None:
    body: object = value
    for _ in range(depth):
        body = [body]
    with pytest.raises(ValueError, match="JSON"):
        list(json_pieces({"x": body}))


@given(st.lists(st.integers(0, 3)))
def test_gathered_pieces_are_the_same_bytes(sizes: list[int]) -> None:
    pieces = [b"x" * (size * PART_BYTES // 2) for size in sizes]
    some = list(gathered(pieces))
    assert b"".join(some) == b"".join(pieces)
    assert all(some)
    assert all(len(piece) >= PART_BYTES for piece in some[:-1])


async def test_the_loop_runs_between_the_pieces_of_a_long_body() -> None:
    body = {"x": ["y" * PART_BYTES] * 5}
    with counted_turns() as turns:
        assert len(await json_paced(body)) >= 5
    assert turns.count >= 5
    assert await json_bytes(body) == library(body)
