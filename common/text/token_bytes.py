"""What bytes each token stands for, read from a tokenizer's decoder. Knows nothing of sequences of tokens.

Two kinds of decoder cover the Llama and Qwen families: byte-level BPE, which writes every byte as a printable
character, and SentencePiece, which writes a space as U+2581 and a byte without a token of its own as `<0xNN>`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from common.errors import ModelError

PieceBytes = Callable[[str], bytes]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def piece_decoder(decoder: Mapping[str, Any] | None) -> PieceBytes:
    """The function from a token's spelling to its bytes, for the `decoder` entry of a tokenizer.json.

    Raises ModelError for decoders whose tokens have no bytes of their own (WordPiece and the like).
    """
    kinds = {str(part.get("type")) for part in _parts(decoder)}
    if "ByteLevel" in kinds:
        return byte_level_piece
    if kinds & {"ByteFallback", "Metaspace"}:
        return sentencepiece_piece
    raise ModelError(f"unsupported tokenizer decoder {sorted(kinds)}: expected ByteLevel, ByteFallback or Metaspace")


def _parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def byte_level_piece(piece: str) -> bytes:
    """Each character is one byte; a piece with any other character (an added token) stands for itself."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()


def sentencepiece_piece(piece: str) -> bytes:
    """`<0xNN>` is one byte, U+2581 a space; the rest stands for itself."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes((int(match.group(1), 16),))
    return piece.replace(_SPACE_MARK, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are themselves, the other 68 bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF_CHARACTER: Mapping[str, int] = _byte_level_alphabet()
