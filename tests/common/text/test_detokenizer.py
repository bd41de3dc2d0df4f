"""Streaming text equals the text at once, for any text and any cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.detokenizer import Detokenizer
from common.text.tokenizer import Tokenizer

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skipped_ids=tokenizer.special_ids if skip else frozenset())
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(data=st.data())
@settings(max_examples=150)
def test_any_text_survives(kind: str, request: pytest.FixtureRequest, data: st.DataObject) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = data.draw(TEXT)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if kind == "byte_level":
        assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data())
@settings(max_examples=200)
def test_any_ids_stream_to_their_decoding(byte_level: Tokenizer, data: st.DataObject) -> None:
    """Also halves of characters in any order, special tokens, and ids without a token."""
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=30))
    for skip in (True, False):
        pieces = stream(byte_level, ids, skip=skip)
        assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=skip)


def test_character_comes_whole_with_its_last_token(byte_level: Tokenizer) -> None:
    ids = [id_ for byte in "😀".encode() for id_ in byte_token(byte_level, byte)]
    assert stream(byte_level, ids) == ["", "", "", "😀", ""]


def test_special_token_within_a_character_is_skipped(byte_level: Tokenizer) -> None:
    parts = [id_ for byte in "é".encode() for id_ in byte_token(byte_level, byte)]
    assert "".join(stream(byte_level, [parts[0], 2, parts[1]])) == "é"


def test_half_characters_for_ever_neither_stall_nor_grow(byte_level: Tokenizer) -> None:
    half = byte_token(byte_level, 0xF0)
    pieces = stream(byte_level, half * 1000)
    assert set(pieces[1:]) == {"\ufffd"}
    assert len("".join(pieces)) == 1000


def test_leading_space_is_kept(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert "".join(stream(byte_level, byte_level.encode(" Paris"))) == " Paris"
    the = sentencepiece.token_id("\u2581th")
    assert the is not None
    assert "".join(stream(sentencepiece, [the, the])) == " th th"


def byte_token(tokenizer: Tokenizer, byte: int) -> list[int]:
    """The token of one byte."""
    return [next(id_ for id_ in range(tokenizer.vocab_size) if tokenizer.token_bytes(id_) == bytes([byte]))]
