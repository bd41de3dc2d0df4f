"""A byte-level tokenizer, the vocabulary of a model with it, and a bench for grammars over it."""

from pathlib import Path

import pytest

from common.engine.grammar.vocabulary import Vocabulary
from common.text.tokenizer import Tokenizer
from tests.common.engine.grammar.tiny import END_IDS, Bench, make_vocabulary
from tests.common.text.model_folders import byte_level_folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("grammar") / "tokenizer"
    tokenizer = Tokenizer.load(byte_level_folder(folder))
    assert (tokenizer.eos_id,) == END_IDS
    return tokenizer


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return make_vocabulary(tokenizer)


@pytest.fixture(scope="session")
def bench(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Bench:
    return Bench(tokenizer, vocabulary)
