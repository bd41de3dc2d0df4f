"""The cache of grammars: bounded in bytes, the least recently used goes first."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.grammar.cache import Entry, GrammarCache, digest

KEYS = [bytes([i]) for i in range(6)]
MAX_BYTES = 8000


@given(steps=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-1, 2000)), max_size=60))
def test_it_is_a_bounded_lru(steps: list[tuple[bytes, int]]) -> None:
    """Against a list in order of use; -1 looks a key up, other numbers put a refusal of that length."""
    cache, model = GrammarCache(MAX_BYTES), list[tuple[bytes, str]]()
    for key, length in steps:
        kept = dict(model).get(key)
        model = [(k, v) for k, v in model if k != key]
        if length < 0:
            assert cache.get(key) == kept
            model += [] if kept is None else [(key, kept)]
            continue
        cache.put(key, "x" * length)
        if cost(length) <= MAX_BYTES:
            model.append((key, "x" * length))
        while sum(cost(len(v)) for _, v in model) > MAX_BYTES:
            model.pop(0)
        assert len(cache) == len(model)
        assert cache.num_bytes == sum(cost(len(v)) for _, v in model) <= MAX_BYTES
    assert [cache.get(key) for key in KEYS] == [dict(model).get(key) for key in KEYS]


def cost(length: int) -> int:
    probe = GrammarCache(1 << 30)
    probe.put(b"", "x" * length)
    return probe.num_bytes


def test_a_grammar_counts_by_its_memory() -> None:
    @dataclass
    class Heavy:
        num_bytes: int

    cache = GrammarCache(10_000)
    heavy: list[Entry] = [Heavy(6000), Heavy(6001), Heavy(10_001)]  # type: ignore[list-item]
    cache.put(b"a", heavy[0])
    cache.put(b"b", heavy[1])
    assert cache.get(b"a") is None and cache.get(b"b") is heavy[1]
    cache.put(b"c", heavy[2])
    assert cache.get(b"c") is None and cache.get(b"b") is heavy[1]


@pytest.mark.parametrize(("one", "other"), [((b"ab", b"c"), (b"a", b"bc")), ((b"",), ()), ((b"a",), (b"b",))])
def test_parts_are_told_apart(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> None:
    assert digest(*one) == digest(*one) != digest(*other)
