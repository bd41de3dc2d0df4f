"""Grammars that another worker has compiled."""

from collections.abc import Iterator

import numpy as np
import pytest

from common.engine.grammar.loader import GrammarLoader
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest, Overloaded
from common.sampling import GrammarKind
from tests.common.engine.grammar.tiny import Bench, mask_of

REGEX = GrammarKind.REGEX


@pytest.fixture
def loader(vocabulary: Vocabulary) -> Iterator[GrammarLoader]:
    made = GrammarLoader(vocabulary)
    yield made
    made.close()


def test_it_is_the_same_grammar_and_kept(bench: Bench, loader: GrammarLoader) -> None:
    there = bench.regex("one|two")
    here = loader.load(REGEX, there.serialized).result(30)
    assert np.array_equal(mask_of(here.start()), mask_of(there.start()))
    assert loader.load(REGEX, bytes(there.serialized)).result(30) is here
    assert loader.load(REGEX, bench.regex("one").serialized).result(30) is not here


@pytest.mark.parametrize("serialized", [b"", b"{}", b"\xff", b'{"__VERSION__": "0"}'])
def test_other_bytes_are_refused_in_words_each_time(loader: GrammarLoader, serialized: bytes) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no compiled grammar") as error:
            loader.load(REGEX, serialized).result(30)
        assert error.value.field == "compiled_grammar"


def test_a_model_without_a_vocabulary_takes_none(bench: Bench) -> None:
    loader = GrammarLoader(None)
    with pytest.raises(InvalidRequest, match="takes no grammars"):
        loader.load(REGEX, bench.regex("one").serialized).result(30)
    loader.close()


def test_after_close_it_is_a_shortage(bench: Bench, loader: GrammarLoader) -> None:
    loader.close()
    with pytest.raises(Overloaded):
        loader.load(REGEX, bench.regex("one").serialized).result(30)
