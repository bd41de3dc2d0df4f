"""Block hashes: chained, stable, and apart from each other wherever the content may not be shared."""

from array import array
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.hashing import BlockHasher, block_hashes

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
block_sizes = st.integers(1, 7)


def test_hashes_never_change_between_versions_and_machines() -> None:
    # Peers and gateways of different builds compare them: changing these constants is a protocol change.
    assert [h.hex() for h in block_hashes(range(1, 9), 4, "tenant", adapter="lora")] == [
        "79af4634c812bcc8ac03ccda4f7ee1ba",
        "3f3441a82d8995ba6a6b3ac94fb7b694",
    ]


def test_a_hash_is_a_digest_of_the_previous_one_and_the_tokens_as_little_endian_uint32() -> None:
    first, second = block_hashes([1, 2, 3, 2**32 - 1], 2)
    assert len(first) == 16
    assert second == blake2b(first + bytes([3, 0, 0, 0, 255, 255, 255, 255]), digest_size=16).digest()


@given(token_lists, block_sizes)
def test_one_hash_per_full_block(token_ids: list[int], block_size: int) -> None:
    assert len(block_hashes(token_ids, block_size)) == len(token_ids) // block_size


@given(token_lists, token_lists, block_sizes)
def test_common_prefix_of_hashes_is_common_prefix_of_blocks(a: list[int], b: list[int], block_size: int) -> None:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    pairs = list(zip(block_hashes(a, block_size), block_hashes(b, block_size), strict=False))
    assert [x == y for x, y in pairs] == [i < same // block_size for i in range(len(pairs))]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": ""}, {"salt": "a"}),
        ({"adapter": "a"}, {"adapter": "b"}),
        ({"salt": "ab", "adapter": "c"}, {"salt": "a", "adapter": "bc"}),
        ({"salt": "a"}, {"adapter": "a"}),
        ({"block_size": 2}, {"block_size": 4}),
    ],
)
def test_nothing_is_shared_across_salts_adapters_and_block_sizes(one: dict[str, str], other: dict[str, str]) -> None:
    tokens = [7] * 8
    a = block_hashes(tokens, **{"block_size": 4, **one})  # type: ignore[arg-type]
    b = block_hashes(tokens, **{"block_size": 4, **other})  # type: ignore[arg-type]
    assert not set(a) & set(b)


def test_equal_blocks_at_different_positions_differ() -> None:
    assert len(set(block_hashes([5] * 12, 4))) == 3


@pytest.mark.parametrize("make", [tuple, np.array, lambda ids: array("I", ids), lambda ids: np.array(ids, np.int64)])
def test_any_sequence_of_ints_hashes_alike(make) -> None:  # type: ignore[no-untyped-def]
    tokens = [1, 2, 3, 4, 5]
    assert block_hashes(make(tokens), 2) == block_hashes(tokens, 2)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_id_outside_32_bits_is_refused_not_wrapped(bad: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes([bad], 1)


@given(st.lists(token_lists, max_size=6), block_sizes)
def test_hasher_gives_the_same_hashes_however_tokens_arrive(pieces: list[list[int]], block_size: int) -> None:
    hasher = BlockHasher(block_size, "salt", adapter="x")
    together: list[int] = []
    for piece in pieces:
        hasher.extend(piece)
        together += piece
        assert list(hasher.hashes) == block_hashes(together, block_size, "salt", adapter="x")
        assert hasher.num_tokens == len(together)


def test_a_copied_hasher_goes_its_own_way() -> None:
    hasher = BlockHasher(2)
    hasher.extend([1, 2, 3])
    twin = hasher.copy()
    hasher.extend([4])
    twin.extend([5, 6])
    assert list(hasher.hashes) == block_hashes([1, 2, 3, 4], 2)
    assert list(twin.hashes) == block_hashes([1, 2, 3, 5], 2)
