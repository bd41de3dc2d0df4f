"""Answers as bytes: those of the standard library, whatever is in them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.json_body import json_body

#: Characters alone: halves of surrogate pairs have no bytes.
_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
_VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner), max_leaves=30)


@given(st.dictionaries(_TEXT, _VALUES))
def test_bytes_are_those_of_the_library(body: dict[str, object]) -> None:
    assert json_body(body) == json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("depth", [0, 3, 8])
def test_what_json_cannot_hold_is_an_error(value: float, depth: int) -> None:
    body: object = value
    for _ in range(depth):
        body = [body]
    with pytest.raises(ValueError, match="JSON"):
        json_body({"x": body})
