"""Grammars that another worker has compiled."""

from collections.abc import Iterator

import numpy as np
import pytest

from common.engine.grammar.loader import GrammarLoader
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest, Overloaded
from common.sampling import GrammarKind
from tests.common.engine.grammar.tiny import Bench, mask_of

EBNF = GrammarKind.EBNF


@pytest.fixture
def loader(vocabulary: Vocabulary) -> Iterator[GrammarLoader]:
    made = GrammarLoader(vocabulary)
    yield made
    made.close()


def test_it_is_the_same_grammar_and_kept(bench: Bench, loader: GrammarLoader) -> None:
    there = bench.regex("one|two")
    here = loader.load(EBNF, there.serialized).result(30)
    assert np.array_equal(mask_of(here.start()), mask_of(there.start()))
    assert loader.load(EBNF, bytes(there.serialized)).result(30) is here
    assert loader.load(EBNF, bench.regex("one").serialized).result(30) is not here


def test_it_is_found_by_digest_and_kind_as_long_as_it_is_kept(bench: Bench, vocabulary: Vocabulary) -> None:
    one, two = bench.regex("one"), bench.regex("two")
    loader = GrammarLoader(vocabulary, cache_bytes=one.num_bytes + two.num_bytes // 2)
    assert loader.find(EBNF, one.digest).result(30) is None
    # The one is not loaded yet when it is looked for.
    loaded, found = loader.load(EBNF, one.serialized), loader.find(EBNF, one.digest)
    assert found.result(30) is loaded.result(30) and found.result(30).digest == one.digest
    assert loader.find(GrammarKind.STRUCTURAL_TAG, one.digest).result(30) is None
    loader.load(EBNF, two.serialized).result(30)
    assert loader.find(EBNF, one.digest).result(30) is None
    assert loader.find(EBNF, two.digest).result(30) is not None
    loader.close()
    with pytest.raises(Overloaded):
        loader.find(EBNF, two.digest).result(30)


@pytest.mark.parametrize("serialized", [b"", b"{}", b"\xff", b'{"__VERSION__": "0"}'])
def test_other_bytes_are_refused_in_words_each_time(loader: GrammarLoader, serialized: bytes) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no compiled grammar") as error:
            loader.load(EBNF, serialized).result(30)
        assert error.value.field == "compiled_grammar"


def test_a_model_without_a_vocabulary_takes_none(bench: Bench) -> None:
    loader = GrammarLoader(None)
    with pytest.raises(InvalidRequest, match="takes no grammars"):
        loader.load(EBNF, bench.regex("one").serialized).result(30)
    loader.close()


def test_after_close_it_is_a_shortage(bench: Bench, loader: GrammarLoader) -> None:
    loader.close()
    with pytest.raises(Overloaded):
        loader.load(EBNF, bench.regex("one").serialized).result(30)
