"""Our tokenizer against transformers' for the same folders, and its own promises."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from common.errors import ModelError
from common.text.tokenizer import Tokenizer, tokenizer_fingerprint
from tests.common.text.model_folders import byte_level_folder, sentencepiece_folder

TEXTS = (
    "",
    " ",
    "The capital of France is",
    "  two  spaces ",
    "A naïve café in 日本語, 😀🎉",
    "line\n\n\tbreaks\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "</s> in text <s>",
    "\x00\x7f\u200d\ufffd",
    "Long enough to be encoded in another way: 😀 <|im_end|>\n" * 100,
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level_path", "sentencepiece_path"])
@pytest.mark.parametrize("add_special", [True, False])
def test_encodes_like_transformers(kind: str, text: str, add_special: bool, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    reference = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    assert ours.encode(text, add_special_tokens=add_special) == reference.encode(text, add_special_tokens=add_special)


@pytest.mark.parametrize("options", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_begin_token_like_transformers(tmp_path: Path, options: dict[str, bool]) -> None:
    """The post-processor in tokenizer.json decides, whatever tokenizer_config.json says."""
    folder = byte_level_folder(tmp_path, **options)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(folder).encode("hi") == Tokenizer.load(folder).encode("hi")
    library.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    library.save(str(folder / "tokenizer.json"))
    ids = Tokenizer.load(folder).encode("hi")
    assert ids == AutoTokenizer.from_pretrained(folder).encode("hi")
    assert ids[0] == 1
    assert Tokenizer.load(folder).encode("hi", add_special_tokens=False) == ids[1:]


def test_named_special_token_in_the_plain_vocabulary_is_special(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, eos_token="q")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_id in tokenizer.special_ids
    assert tokenizer.encode("one q two") == AutoTokenizer.from_pretrained(folder).encode("one q two")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_decodes_like_transformers(byte_level_path: Path, text: str, skip: bool) -> None:
    reference = AutoTokenizer.from_pretrained(byte_level_path)
    ours = Tokenizer.load(byte_level_path)
    ids = ours.encode(text)
    assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", [text for text in TEXTS if text and not text.startswith(" ")])
def test_sentencepiece_decodes_like_transformers_but_keeps_the_leading_space(
    sentencepiece_path: Path, text: str
) -> None:
    """An answer continues a prompt, so the space in front of its first word belongs to it."""
    reference = AutoTokenizer.from_pretrained(sentencepiece_path)
    ours = Tokenizer.load(sentencepiece_path)
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == " " + reference.decode(ids, skip_special_tokens=True)


def test_invalid_bytes_decode_like_transformers(byte_level_path: Path) -> None:
    reference = AutoTokenizer.from_pretrained(byte_level_path)
    ours = Tokenizer.load(byte_level_path)
    smile = ours.encode("😀")
    for ids in (smile[:1], smile[:1] * 5, [*smile[:2], *ours.encode("x")], smile[1:], [*smile[:1], *smile]):
        assert ours.decode(ids) == reference.decode(ids)


def test_special_tokens_are_parsed_or_left_as_text(byte_level: Tokenizer) -> None:
    end = byte_level.token_id("<|im_end|>")
    assert byte_level.encode("<|im_end|>") == [end]
    literal = byte_level.encode("<|im_end|>", parse_special=False)
    assert end not in literal
    assert byte_level.decode(literal) == "<|im_end|>"


def test_facts_of_the_folder(byte_level: Tokenizer, byte_level_path: Path, sentencepiece: Tokenizer) -> None:
    vocabulary = json.loads((byte_level_path / "tokenizer.json").read_text())
    assert byte_level.special_ids == {0, 1, 2}
    assert byte_level.vocab_size == len(vocabulary["model"]["vocab"]) + 1
    assert (byte_level.bos_id, byte_level.eos_id) == (1, 2)
    assert sentencepiece.eos_id == 2  # given as an object in the configuration


def test_token_bytes_and_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    smile = byte_level.encode("😀")
    assert b"".join(map(byte_level.token_bytes, smile)) == "😀".encode()
    assert byte_level.token_bytes(10**6) == b""
    assert byte_level.token_bytes(-1) == b""
    assert sentencepiece.token_bytes(3 + 0xF0) == b"\xf0"
    assert sentencepiece.token_text(3 + 0xF0) == "bytes:\\xf0"
    the = sentencepiece.token_id("\u2581th")
    assert the is not None
    assert sentencepiece.token_text(the) == " th"


def test_added_token_with_a_space_stands_for_itself(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    path = folder / "tokenizer.json"
    library = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    library.add_tokens([AddedToken("<a b>", special=False)])
    library.save(str(path))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("x<a b>y")) == "x<a b>y"


def test_unusable_folders_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    folder = byte_level_folder(tmp_path / "wordpiece")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.load(folder)


def test_truncation_saved_in_the_folder_does_not_cut_prompts(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    library = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    library.enable_truncation(max_length=2)
    library.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder).encode("The capital of France is")) > 2


def test_fingerprint_follows_content_not_form(tmp_path: Path) -> None:
    first = byte_level_folder(tmp_path / "a")
    second = byte_level_folder(tmp_path / "b")
    path = second / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)
    others = [
        byte_level_folder(tmp_path / "c", template="other"),
        byte_level_folder(tmp_path / "d", eos_token="<|endoftext|>"),
        sentencepiece_folder(tmp_path / "e"),
    ]
    assert len({tokenizer_fingerprint(folder) for folder in (first, *others)}) == 4
