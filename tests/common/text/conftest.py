"""Tokenizers of tiny folders, made once."""

from pathlib import Path

import pytest

from common.text.tokenizer import Tokenizer
from tests.common.text.model_folders import byte_level_folder, sentencepiece_folder


@pytest.fixture(scope="session")
def byte_level_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def byte_level(byte_level_path: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_path)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_path: Path) -> Tokenizer:
    return Tokenizer.load(sentencepiece_path)
