"""From the text of a chat answer's choices to their parts: one parser for each choice. Knows no API."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from common.sampling import FinishReason
from gateway.chat.parts import AnswerParser, Part, ReasoningPart, TextPart, ToolCallArguments, ToolCallStart
from gateway.chat.reasoning import ReasoningParser
from gateway.chat.request import ToolCall
from gateway.completion import ChoiceDelta, TextToken


class ChatFinish(Enum):
    """Why a chat choice ended."""

    STOP = "stop"
    LENGTH = "length"
    #: It ended by itself and has called tools.
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What one delta of text adds to its choice; everything but `choice` may be empty."""

    choice: int
    parts: tuple[Part, ...]
    #: All tokens, whichever part they belong to.
    tokens: tuple[TextToken, ...]
    finish: ChatFinish | None
    #: As in ChoiceDelta.
    stop_reason: str | int | None = None


class ChatAnswer:
    """The choices of one answer. Feed it every delta, in order."""

    def __init__(self, new_parser: Callable[[], AnswerParser]) -> None:
        self._new_parser = new_parser
        self._choices: dict[int, _Choice] = {}

    def read(self, choice: int, delta: ChoiceDelta) -> ChatDelta:
        """The parts of one delta. `choice` counts over all prompts of a request (`Answer`), as the APIs do."""
        reading = self._choices.get(choice)
        if reading is None:
            reading = self._choices[choice] = _Choice(self._new_parser())
        return reading.read(choice, delta)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts so far, their marks included, over all choices."""
        return sum(reading.thoughts.count for reading in self._choices.values())


class _Choice:
    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.thoughts = _Thoughts()

    def read(self, choice: int, delta: ChoiceDelta) -> ChatDelta:
        parts = self._parser.push(delta.text) if delta.text else []
        finish = None
        if delta.finish_reason is not None:
            parts += self._parser.finish()
            finish = _finish(delta.finish_reason, called_tools=self._parser.called_tools)
        if isinstance(self._parser, ReasoningParser):
            self.thoughts.add(delta.tokens, self._parser.reasoning_characters)
        return ChatDelta(choice, tuple(parts), delta.tokens, finish, delta.stop_reason)


class _Thoughts:
    """Counts the tokens before the place where the answer begins, which becomes known after some of them have come."""

    def __init__(self) -> None:
        self.count = 0
        #: Offsets of tokens that count as long as the answer has not begun.
        self._undecided: list[int] = []
        self._answering = False

    def add(self, tokens: Iterable[TextToken], answer_begins: int | None) -> None:
        if self._answering:
            return
        self._undecided += [token.offset for token in tokens]
        self.count = len(self._undecided)
        if answer_begins is not None:
            self._answering = True
            self.count = sum(offset < answer_begins for offset in self._undecided)
            self._undecided.clear()


def _finish(reason: FinishReason, *, called_tools: bool) -> ChatFinish:
    """A choice that was cut off stays cut off; a forced call ends as any other call."""
    if reason is FinishReason.STOP and called_tools:
        return ChatFinish.TOOL_CALLS
    return ChatFinish(reason.value)


class WholeMessage:
    """All parts of a choice put together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []

    def add(self, part: Part) -> None:
        match part:
            case TextPart(text):
                self._text.append(text)
            case ReasoningPart(text):
                self._reasoning.append(text)
            case ToolCallStart():
                self._calls.append((part, []))
            case ToolCallArguments(_, text):
                self._calls[-1][1].append(text)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        return [ToolCall(start.id, start.name, "".join(arguments)) for start, arguments in self._calls]
