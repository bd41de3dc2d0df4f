"""From a conversation to prompt ids: template and tokenizer together. Knows no API.

What users write stays text: if a message spells a special token (`<|im_end|>`), the prompt gets its letters, not the
token, so that no message can end its own turn and open another. The template's own tokens work as usual. (Hugging
Face does this with `sanitize_control_tokens`; without a special token in a message the ids are the plain ones.)
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from common.text.chat_template import ChatTemplate, Message
from common.text.tokenizer import Tokenizer

#: Breaks up spellings of special tokens while the template runs; a noncharacter, which no text should hold.
_MARK = "\ufdd0"
#: Begins what stands for the final message's content while the template runs; a random part follows.
_PLACE = "\ufdd1"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation."""

    ids: list[int]
    #: As the model reads it; special tokens by their spelling.
    text: str


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> ChatPrompt:
    """The prompt of a conversation; parameters and errors are those of `ChatTemplate.render`, and

    Args:
        continue_final_message: the prompt ends with the content (a string) of the last message exactly as it is given,
            whatever the template does to contents; `add_generation_prompt` must be off. Raises InvalidRequest (field
            `continue_final_message`) if the template does not show it.
    """
    marked = [_mark(message, tokenizer.special_texts) for message in messages]
    marked_tools = None if tools is None else [_mark(tool, tokenizer.special_texts) for tool in tools]
    final: str | None = None
    if continue_final_message:
        assert not add_generation_prompt, "the final message is continued"
        final = marked[-1]["content"]
        place = f"{_PLACE}{secrets.token_hex(8)}"
        marked[-1] = {**marked[-1], "content": place}
    text = template.render(marked, add_generation_prompt=add_generation_prompt, tools=marked_tools, variables=variables)
    if final is not None:
        text = _until(text, place) + final
        marked[-1] = {**marked[-1], "content": final}
    if marked == list(messages) and marked_tools == (None if tools is None else list(tools)):
        return ChatPrompt(tokenizer.encode(text, add_special_tokens=False), text)
    return ChatPrompt(_encode_marked(tokenizer, text), text.replace(_MARK, ""))


def _until(text: str, place: str) -> str:
    before, found, _ = text.rpartition(place)
    if not found:
        message = "the chat template does not show the final message as it is, so that it cannot be continued"
        raise InvalidRequest(message, field="continue_final_message")
    return before


def _mark(value: Any, special_texts: re.Pattern[str]) -> Any:
    """The value with a mark inside each spelling of a special token, in strings at any depth, keys included."""
    if isinstance(value, str):
        return special_texts.sub(lambda match: match[0][0] + _MARK + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_mark(key, special_texts): _mark(item, special_texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, special_texts) for item in value]
    return value


def _encode_marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes the template's special tokens as tokens and everything between them as plain text."""
    ids: list[int] = []
    position = 0
    for match in tokenizer.special_texts.finditer(text):
        ids += _encode_plain(tokenizer, text[position : match.start()], first=position == 0)
        ids += tokenizer.encode(match[0], add_special_tokens=False)
        position = match.end()
    return ids + _encode_plain(tokenizer, text[position:], first=position == 0)


def _encode_plain(tokenizer: Tokenizer, piece: str, *, first: bool) -> list[int]:
    """SentencePiece puts a space before the start of a text: later pieces are encoded after a newline that is cut."""
    piece = piece.replace(_MARK, "")
    if not piece:
        return []
    if first:
        return tokenizer.encode(piece, add_special_tokens=False, parse_special=False)
    newline = tokenizer.encode("\n", add_special_tokens=False, parse_special=False)
    ids = tokenizer.encode("\n" + piece, add_special_tokens=False, parse_special=False)
    if ids[: len(newline)] == newline:
        return ids[len(newline) :]
    return tokenizer.encode(piece, add_special_tokens=False, parse_special=False)
