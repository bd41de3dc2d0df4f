"""What grammars are compiled against: the bytes of each token of a model, and the tokens that end its output."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import xgrammar

from common.engine.grammar.grammar import Grammar
from common.text.tokenizer import Tokenizer
from common.text.tokenizer_files import TOKENIZER_FILE


class Vocabulary:
    """Immutable, shared by threads."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self._info = info

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> Self:
        """Tokens of `tokenizer`, padded to a model's logits.

        No grammar allows special tokens (their text is no output) or ids without a token, but for the ends.

        Args:
            vocab_size: width of the model's logits; tokens beyond cannot be drawn and are left out.
            end_token_ids: at least one; exactly these are allowed at a grammar's end.
        """
        assert end_token_ids, "a grammar needs a token that ends it"
        special = tokenizer.special_ids | set(end_token_ids)
        known = min(tokenizer.vocab_size, vocab_size)
        tokens = [b"" if i in special else tokenizer.token_bytes(i) for i in range(known)]
        return cls(
            xgrammar.TokenizerInfo(
                tokens, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=sorted(set(end_token_ids))
            )
        )

    @classmethod
    def deserialize(cls, serialized: bytes) -> Self:
        return cls(xgrammar.TokenizerInfo.deserialize_json(serialized.decode()))

    def serialize(self) -> bytes:
        return str(self._info.serialize_json()).encode()

    @property
    def info(self) -> xgrammar.TokenizerInfo:
        return self._info

    def load_grammar(self, serialized: bytes) -> Grammar:
        """A grammar that was compiled elsewhere. ValueError if these bytes are none, or of another vocabulary."""
        try:
            compiled = xgrammar.CompiledGrammar.deserialize_json(serialized.decode(), self._info)
        except (RuntimeError, UnicodeDecodeError) as error:
            raise ValueError(f"no compiled grammar of this model's vocabulary: {error}") from error
        return Grammar(compiled, serialized)


def vocabulary_of_folder(folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> Vocabulary | None:
    """The vocabulary of a model folder; None if it has no tokenizer, or no end token: such a model has no grammars.

    Raises ModelError for a tokenizer that cannot be read.
    """
    if not end_token_ids or not (folder / TOKENIZER_FILE).is_file():
        return None
    return Vocabulary.of(Tokenizer.load(folder), vocab_size, end_token_ids)
