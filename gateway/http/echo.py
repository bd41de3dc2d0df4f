"""A prompt as it stands in front of a completion, and where its tokens are in it. Knows no request."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.text.detokenizer import Detokenizer
from common.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """An echoed prompt."""

    text: str
    token_ids: tuple[int, ...] = ()
    #: For each token the whole characters of `text` before it: where the character is in which its first byte lies.
    offsets: tuple[int, ...] = ()


def plain_echo(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> Echo:
    """A text as the client gave it; token ids as text, special tokens included."""
    return Echo(prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False))


def aligned_echo(tokenizer: Tokenizer, prompt: str | Sequence[int], ids: Sequence[int]) -> Echo:
    """The same with the place of each token.

    What the tokenizer put around the client's text (a begin token, a space) takes no room in it. If its tokens do not
    spell the text even so, because it rewrites texts, then what they spell is echoed.
    """
    spelled, offsets = _spelled(tokenizer, ids)
    text, surplus = spelled, 0
    if isinstance(prompt, str) and spelled.endswith(prompt):
        text, surplus = prompt, len(spelled) - len(prompt)
    elif isinstance(prompt, str) and spelled.startswith(prompt):
        text = prompt
    return Echo(text, tuple(ids), tuple(min(max(offset - surplus, 0), len(text)) for offset in offsets))


def _spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Text of the tokens, special ones included, and the characters that were complete before each."""
    detokenizer = Detokenizer(tokenizer)
    pieces: list[str] = []
    offsets: list[int] = []
    length = 0
    for id_ in ids:
        offsets.append(length)
        pieces.append(detokenizer.push(id_))
        length += len(pieces[-1])
    return "".join(pieces) + detokenizer.flush(), offsets
