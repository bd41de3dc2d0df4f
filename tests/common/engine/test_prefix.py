"""How much of a prompt a prefix-cache hit may save."""

from hypothesis import given
from hypothesis import strategies as st

from common.engine.prefix import usable_prefix


def test_the_last_prompt_token_is_always_computed() -> None:
    assert usable_prefix(1, 0, 4) == 0
    assert usable_prefix(4, 1, 4) == 0
    assert usable_prefix(5, 1, 4) == 4
    assert usable_prefix(8, 2, 4) == 4
    assert usable_prefix(9, 2, 4) == 8
    assert usable_prefix(100, 2, 4) == 8


@given(st.integers(1, 500), st.integers(0, 100), st.integers(1, 64))
def test_as_many_whole_blocks_as_leave_a_token(num_tokens: int, matched: int, block_size: int) -> None:
    usable = usable_prefix(num_tokens, matched, block_size)
    assert usable % block_size == 0
    assert usable <= min(num_tokens - 1, matched * block_size)
    assert usable + block_size > min(num_tokens - 1, matched * block_size)
