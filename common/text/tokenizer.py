"""Text to token ids and back for one model folder, on the `tokenizers` library. Knows no model, template or stream.

Begin and end tokens are added as Hugging Face does: by the post-processor of tokenizer.json alone
(`add_bos_token` and `add_eos_token` of tokenizer_config.json are for folders without that file).

Text that spells a special token (`<|im_end|>`) becomes that token, as with Hugging Face and vLLM, unless
`encode(..., parse_special=False)` asks for the letters. Completions parse, so that a prompt can be rendered by hand;
chats don't parse what stands in messages (see `chat_template`).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import tokenizers

from common.errors import ModelError
from common.text.token_bytes import PieceBytes, piece_decoder
from common.text.tokenizer_files import (
    TOKENIZER_FILE,
    SpecialTokens,
    read_special_tokens,
    tokenizer_fingerprint,
)

__all__ = ["Tokenizer", "tokenizer_fingerprint"]

#: Characters that are encoded in less than a millisecond or two.
_SHORT = 4096


class Tokenizer:
    """Stateless between calls, safe to use from several threads."""

    def __init__(self, library: tokenizers.Tokenizer, special: SpecialTokens, piece_bytes: PieceBytes) -> None:
        self._library = library
        self._literal = tokenizers.Tokenizer.from_str(library.to_str())
        self._literal.encode_special_tokens = True
        self._piece_bytes = piece_bytes
        self.special = special
        added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._special_texts = re.compile(_alternatives([token.content for token in added.values() if token.special]))
        self._size = library.get_vocab_size(with_added_tokens=True)
        #: Filled as tokens are met; one entry per id at most.
        self._bytes: dict[int, bytes] = {}
        self._longest = max(map(len, library.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises ModelError if the folder has no tokenizer.json or one of an unsupported kind."""
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelError(f"{folder} has no {TOKENIZER_FILE}")
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            raise ModelError(f"{path} cannot be read: {error}") from error
        # A folder saved by a training script may have these on; a server must see the text as it is.
        library.no_truncation()
        library.no_padding()
        special = read_special_tokens(folder)
        _mark_as_special(library, special)
        return cls(library, special, piece_decoder(json.loads(library.to_str()).get("decoder")))

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows; the model's embedding may be padded beyond."""
        return self._size

    @property
    def longest_token(self) -> int:
        """Characters of the longest token's spelling: no text has fewer tokens than its length over this."""
        return self._longest

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: skipped in generated text."""
        return self._special_ids

    @property
    def special_texts(self) -> re.Pattern[str]:
        """Matches every spelling of a special token, longest first; matches nothing if there is none."""
        return self._special_texts

    @property
    def bos_id(self) -> int | None:
        return self._id_of(self.special.bos)

    @property
    def eos_id(self) -> int | None:
        return self._id_of(self.special.eos)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling in the vocabulary."""
        return self._library.token_to_id(token)

    def piece(self, token_id: int) -> str:
        """A token as the vocabulary spells it; "" for an id without a token."""
        return (self._library.id_to_token(token_id) if 0 <= token_id < self._size else None) or ""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: add the begin and end tokens that the model wants around a prompt.
            parse_special: take the spelling of a special token for the token; if not, for plain text.
        """
        library = self._library if parse_special else self._literal
        if len(text) <= _SHORT:
            short: list[int] = library.encode(text, add_special_tokens=add_special_tokens).ids
            return short
        # Other threads run meanwhile, which `encode` does not let them: half a megabyte would stop them for a second.
        ids: list[int] = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once; bytes that are no UTF-8 become U+FFFD. Unknown ids stand for nothing."""
        kept = (id_ for id_ in ids if not (skip_special_tokens and id_ in self._special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, leading space included; b"" for an id without a token."""
        cached = self._bytes.get(token_id)
        if cached is None:
            piece = self._library.id_to_token(token_id) if 0 <= token_id < self._size else None
            cached = b"" if piece is None else self._piece_bytes(piece)
            if piece is not None:
                self._bytes[token_id] = cached
        return cached

    def token_text(self, token_id: int) -> str:
        r"""A token by itself, for log probabilities: its text, or `bytes:\xNN` for a part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.token_id(token)


def _alternatives(texts: list[str]) -> str:
    """A pattern for any of the texts, the longest where several fit; one that never matches for none."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)"


def _mark_as_special(library: tokenizers.Tokenizer, special: SpecialTokens) -> None:
    """Named special tokens are special even if tokenizer.json holds them as plain vocabulary."""
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    named = (special.bos, special.eos, special.unk, special.pad)
    missing = [text for text in named if text and text not in added and library.token_to_id(text) is not None]
    library.add_special_tokens(missing)
