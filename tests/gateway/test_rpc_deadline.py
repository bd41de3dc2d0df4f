"""Deadlines of gRPC calls: whatever is left of one is either a time limit the request may have, or over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DeadlineExceeded
from gateway.options import GenerationOptions
from gateway.rpc.deadline import seconds_left
from gateway.validation import check_options

SECONDS = st.floats(allow_nan=False) | st.floats(-0.01, 0.01)


@given(SECONDS)
def test_no_time_left_is_no_mistake_of_the_request(remaining: float) -> None:
    try:
        timeout = seconds_left(remaining)
    except DeadlineExceeded:
        assert remaining < 0.001
    else:
        check_options(GenerationOptions(timeout=timeout), vocab_size=100)


@pytest.mark.parametrize(("remaining", "timeout"), [(None, None), (1e9, None), (5.0, 5.0), (0.001, 0.001)])
def test_time_limit(remaining: float | None, timeout: float | None) -> None:
    assert seconds_left(remaining) == timeout


@pytest.mark.parametrize("remaining", [0.0009, 0.0, -3.0])
def test_past(remaining: float) -> None:
    with pytest.raises(DeadlineExceeded, match="no time"):
        seconds_left(remaining)
