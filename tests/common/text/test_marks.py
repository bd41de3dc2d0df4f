"""Which marks of tool calls and thoughts are tokens of their own."""

from pathlib import Path

from common.text.marks import ARGS, MARKS, TOOL_CALLS, special_mark_ids
from common.text.tokenizer import Tokenizer
from tests.common.text.model_folders import byte_level_folder, sentencepiece_folder


def test_special_marks_are_found_and_ordinary_ones_are_not(tmp_path: Path) -> None:
    plain = Tokenizer.load(byte_level_folder(tmp_path / "plain"))
    assert plain.token_id("<think>") is not None and special_mark_ids(plain) == frozenset()
    marked = Tokenizer.load(byte_level_folder(tmp_path / "marked", special=(TOOL_CALLS, ARGS, "[INST]")))
    assert special_mark_ids(marked) == {marked.token_id(TOOL_CALLS), marked.token_id(ARGS)}
    assert special_mark_ids(marked, ["[INST]", ARGS, "</think>"]) == {marked.token_id("[INST]"), marked.token_id(ARGS)}


def test_a_special_mark_stands_for_its_letters(tmp_path: Path) -> None:
    """What a grammar takes it for is what the parser reads."""
    for make in (byte_level_folder, sentencepiece_folder):
        tokenizer = Tokenizer.load(make(tmp_path / make.__name__, special=MARKS))
        assert len(special_mark_ids(tokenizer)) == len(MARKS)
        for mark in MARKS:
            token_id = tokenizer.token_id(mark)
            assert token_id is not None and tokenizer.token_bytes(token_id) == mark.encode()
