"""Tells what a model thinks (`<think>...</think>`) from its answer, which another parser reads. Knows no tools.

Thoughts come first, if at all. Blanks around them are left out.
"""

from enum import Enum
from typing import Any

from common.errors import ConfigError
from common.text.chat_template import ChatTemplate
from common.text.marks import END_THINK, THINK
from common.text.tokenizer import Tokenizer
from gateway.chat.parts import AnswerParser, Part, ReasoningPart, TextPart
from gateway.chat.structure import Node, any_text, optional, regex, sequence, tag
from gateway.chat.tools.reader import held_suffix

#: What `--reasoning-parser` takes.
REASONING_PARSERS = ("auto", "think", "none")


def reasons(option: str, template: ChatTemplate, tokenizer: Tokenizer) -> bool:
    """Whether a model's thoughts are looked for; `auto`: its template or vocabulary has the mark that ends them.

    Raises ConfigError for an unknown option.
    """
    if option not in REASONING_PARSERS:
        parsers = ", ".join(REASONING_PARSERS)
        raise ConfigError(f"the reasoning parser must be one of {parsers}", field="reasoning_parser")
    if option == "auto":
        return END_THINK in template.tool_source or tokenizer.token_id(END_THINK) is not None
    return option == "think"


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Template variables: the model behind it may know the effort; `none` switches thinking off where templates can."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


class Thinking(Enum):
    """How a prompt leaves the model."""

    #: The model may begin to think, or answer at once.
    FREE = 0
    #: The prompt has opened the thoughts: the answer begins behind their end.
    OPEN = 1
    #: The prompt has closed them.
    CLOSED = 2


def thinking_of(prompt_end: str) -> Thinking:
    """Args: the end of the prompt behind everything that clients wrote, or of the message that is continued."""
    begin, end = prompt_end.rfind(THINK), prompt_end.rfind(END_THINK)
    if begin == end:
        return Thinking.FREE
    return Thinking.OPEN if begin > end else Thinking.CLOSED


def behind_thoughts(answer: Node, thinking: Thinking) -> Node:
    """A grammar that begins where the thoughts end."""
    blanks = regex(r"\n{0,2}")
    if thinking is Thinking.OPEN:
        return sequence(tag("", any_text(), END_THINK), blanks, answer)
    if thinking is Thinking.FREE:
        return sequence(optional(sequence(tag(THINK, any_text(), END_THINK), blanks)), answer)
    return answer


class _Place(Enum):
    #: Where thoughts may begin.
    START = 0
    THOUGHTS = 1
    ANSWER = 2


class ReasoningParser:
    """Before, in or behind the thoughts; `_buffer` is what was not understood yet."""

    def __init__(self, answer: AnswerParser, thinking: Thinking, *, separate: bool = True) -> None:
        """
        Args:
            answer: reads what follows the thoughts.
            separate: if not, the thoughts come out as text, marks included.
        """
        self._answer = answer
        self._thinking = thinking
        self._separate = separate
        self._place = _Place.ANSWER if thinking is Thinking.CLOSED else _Place.START
        self._buffer = ""
        #: Blanks before anything else.
        self._lead: list[str] = []
        #: Blanks behind the thoughts so far; they count if more thoughts follow.
        self._blanks: list[str] = []
        self._shown_thought = False
        #: There were thoughts, and they ended.
        self._thought = False
        self._answered = False
        self._received = 0
        #: Characters of the choice's text before its answer, marks included; None while that has not begun.
        self.reasoning_characters: int | None = 0 if thinking is Thinking.CLOSED else None

    @property
    def called_tools(self) -> bool:
        return self._answer.called_tools

    def push(self, text: str) -> list[Part]:
        self._received += len(text)
        self._buffer += text
        parts: list[Part] = []
        if self._place is _Place.START:
            self._start(parts)
        if self._place is _Place.THOUGHTS:
            self._think(parts)
        if self._place is _Place.ANSWER:
            self._push_answer(parts)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        self._take_lead()
        if self._place is _Place.START and self._thinking is Thinking.FREE:
            self._place = _Place.ANSWER
            self.reasoning_characters = 0
            self._push_answer(parts)
        elif self._place is not _Place.ANSWER:
            self._show_thought(self._buffer, parts)
        return parts + self._answer.finish()

    def _start(self, parts: list[Part]) -> None:
        """A mark may come first, also where the prompt had it already."""
        rest = self._buffer.lstrip()
        if not rest:  # put aside, so that many of them are not looked at again and again
            self._lead.append(self._buffer)
            self._buffer = ""
            return
        if len(rest) < len(THINK) and THINK.startswith(rest):
            return
        self._take_lead()
        if rest.startswith(THINK):
            self._place = _Place.THOUGHTS
            cut = len(self._buffer) - len(rest) + len(THINK)
            if not self._separate:
                parts.append(TextPart(self._buffer[:cut]))
            self._buffer = self._buffer[cut:]
        elif self._thinking is Thinking.OPEN:
            self._place = _Place.THOUGHTS
        else:
            self._place = _Place.ANSWER
            self.reasoning_characters = 0

    def _take_lead(self) -> None:
        self._buffer = "".join(self._lead) + self._buffer
        self._lead.clear()

    def _think(self, parts: list[Part]) -> None:
        thought, mark, rest = self._buffer.partition(END_THINK)
        if not mark:
            shown = len(self._buffer) - held_suffix(self._buffer, END_THINK)
            self._show_thought(self._buffer[:shown], parts)
            self._buffer = self._buffer[shown:]
            return
        self._show_thought(thought if self._separate else thought + END_THINK, parts)
        self._thought, self._buffer, self._place = True, rest, _Place.ANSWER
        self.reasoning_characters = self._received - len(rest)

    def _show_thought(self, text: str, parts: list[Part]) -> None:
        if not self._separate:
            parts += [TextPart(text)] if text else []
            return
        if not self._shown_thought:
            text = text.lstrip()
        shown = text.rstrip()
        if shown:
            self._shown_thought = True
            parts.append(ReasoningPart("".join(self._blanks) + shown))
            self._blanks.clear()
        if len(shown) < len(text):
            self._blanks.append(text[len(shown) :])

    def _push_answer(self, parts: list[Part]) -> None:
        """Blanks between thoughts and answer belong to neither."""
        text, self._buffer = self._buffer, ""
        if self._thought and self._separate and not self._answered:
            text = text.lstrip()
        if text:
            self._answered = True
            parts += self._answer.push(text)
