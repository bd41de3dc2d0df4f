"""From the text of a chat answer's choices to their parts: one parser for each choice. Knows no API."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from common.sampling import FinishReason
from gateway.chat.parts import AnswerParser, Part
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


class ChatAnswer:
    """The choices of one answer. Feed it every delta, in order."""

    def __init__(self, new_parser: Callable[[], AnswerParser]) -> None:
        self._new_parser = new_parser
        self._parsers: dict[int, AnswerParser] = {}

    def read(self, choice: int, delta: ChoiceDelta) -> ChatDelta:
        """The parts of one delta. `choice` counts over all prompts of a request (`Answer`), as the APIs do."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._new_parser()
        parts = parser.push(delta.text) if delta.text else []
        finish = None
        if delta.finish_reason is not None:
            parts += parser.finish()
            finish = _finish(delta.finish_reason, called_tools=parser.called_tools)
        return ChatDelta(choice, tuple(parts), delta.tokens, finish)


def _finish(reason: FinishReason, *, called_tools: bool) -> ChatFinish:
    """A choice that was cut off stays cut off; a forced call ends as any other call."""
    if reason is FinishReason.STOP and called_tools:
        return ChatFinish.TOOL_CALLS
    return ChatFinish(reason.value)
