"""What grammars are compiled against: the bytes of each token of a model, and the tokens that end its output."""

import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Self

import xgrammar

from common.engine.grammar.grammar import Grammar
from common.engine.grammar.surrogates import SurrogateRule, has_surrogate
from common.sampling import GrammarKind
from common.text.marks import special_mark_ids
from common.text.tokenizer import Tokenizer
from common.text.tokenizer_files import TOKENIZER_FILE


class Vocabulary:
    """Immutable, shared by threads.

    Two tables: of plain text, where special tokens stand for nothing and no grammar allows them; and for structural
    tags, which lead through tool calls and thoughts, with the text of those special tokens that are marks of either.
    The gateway turns them into text again (`kept_special_ids`) for answers of that kind alone.
    """

    def __init__(self, plain: xgrammar.TokenizerInfo, marked: xgrammar.TokenizerInfo | None = None) -> None:
        """`marked`: None if it is the same table."""
        self.plain = plain
        self.marked = plain if marked is None else marked
        #: The same for both: no mark has such bytes.
        self.surrogates = SurrogateRule.of(plain.decoded_vocab, plain.vocab_size)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> Self:
        """Tokens of `tokenizer`, padded to a model's logits.

        No grammar allows special tokens that are no marks (their text is no output), ids without a token, or tokens
        that no text can hold, but for the ends. These are never text, even if one is a mark.

        Args:
            vocab_size: width of the model's logits; tokens beyond cannot be drawn and are left out.
            end_token_ids: at least one; exactly these are allowed at a grammar's end.
        """
        assert end_token_ids, "a grammar needs a token that ends it"
        known = min(tokenizer.vocab_size, vocab_size)
        ends = set(end_token_ids)

        def table(silent: Set[int]) -> xgrammar.TokenizerInfo:
            spelled = [b"" if i in silent else tokenizer.token_bytes(i) for i in range(known)]
            tokens = [b"" if has_surrogate(token) else token for token in spelled]
            return xgrammar.TokenizerInfo(
                tokens, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=sorted(ends)
            )

        silent = tokenizer.special_ids | ends
        marks = special_mark_ids(tokenizer) - ends
        return cls(table(silent), table(silent - marks) if any(id_ < known for id_ in marks) else None)

    @classmethod
    def deserialize(cls, serialized: bytes) -> Self:
        return cls(*map(xgrammar.TokenizerInfo.deserialize_json, json.loads(serialized)))

    def serialize(self) -> bytes:
        tables = [self.plain] if self.marked is self.plain else [self.plain, self.marked]
        return json.dumps([str(table.serialize_json()) for table in tables]).encode()

    def table(self, kind: GrammarKind) -> xgrammar.TokenizerInfo:
        """What grammars of this kind are compiled against."""
        return self.marked if kind is GrammarKind.STRUCTURAL_TAG else self.plain

    def load_grammar(self, kind: GrammarKind, serialized: bytes) -> Grammar:
        """A grammar that was compiled elsewhere. ValueError if these bytes are none, or of another vocabulary."""
        try:
            compiled = xgrammar.CompiledGrammar.deserialize_json(serialized.decode(), self.table(kind))
        except (RuntimeError, UnicodeDecodeError) as error:
            raise ValueError(f"no compiled grammar of this model's vocabulary: {error}") from error
        return Grammar(compiled, serialized, self.surrogates)


def vocabulary_of_folder(folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> Vocabulary | None:
    """The vocabulary of a model folder; None if it has no tokenizer, or no end token: such a model has no grammars.

    Raises ModelError for a tokenizer that cannot be read.
    """
    if not end_token_ids or not (folder / TOKENIZER_FILE).is_file():
        return None
    return Vocabulary.of(Tokenizer.load(folder), vocab_size, end_token_ids)
