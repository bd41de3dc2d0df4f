"""The approximate prefix index."""

from gateway.prefixes import ROUTING_BLOCK, PrefixIndex, routing_hashes


def prompt(blocks: int, start: int = 0) -> list[int]:
    return list(range(start, start + blocks * ROUTING_BLOCK))


def test_longest_common_prefix_in_full_blocks() -> None:
    index = PrefixIndex()
    index.record("w", "i1", routing_hashes([*prompt(3), 1, 2], ""))
    longer = routing_hashes([*prompt(2), *prompt(4, start=7)], "")
    assert index.overlap("w", "i1", longer) == 2 * ROUTING_BLOCK
    assert index.overlap("w", "i1", routing_hashes(prompt(9), "")) == 3 * ROUTING_BLOCK
    assert index.overlap("other", "i1", longer) == 0


def test_salts_share_nothing() -> None:
    index = PrefixIndex()
    index.record("w", "i1", routing_hashes(prompt(3), "tenant-a"))
    assert index.overlap("w", "i1", routing_hashes(prompt(3), "tenant-b")) == 0


def test_new_incarnation_is_empty() -> None:
    index = PrefixIndex()
    hashes = routing_hashes(prompt(3), "")
    index.record("w", "i1", hashes)
    assert index.overlap("w", "i2", hashes) == 0
    index.record("w", "i2", hashes[:1])
    assert index.overlap("w", "i2", hashes) == ROUTING_BLOCK
    assert index.overlap("w", "i1", hashes) == 0


def test_least_recently_used_goes_first_and_from_its_end() -> None:
    index = PrefixIndex(max_blocks=4)
    old, new = routing_hashes(prompt(3), ""), routing_hashes(prompt(3, start=10_000), "")
    index.record("w", "i1", old)
    index.record("w", "i1", new)
    assert index.overlap("w", "i1", new) == 3 * ROUTING_BLOCK
    assert index.overlap("w", "i1", old) == ROUTING_BLOCK
    index.drop("w")
    assert index.overlap("w", "i1", new) == 0
