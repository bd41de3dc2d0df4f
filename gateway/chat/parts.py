"""What a chat answer is made of once its text is understood: words, reasoning, tool calls. Knows no API.

A model that calls tools or thinks aloud writes both as text between marks of its own. A parser per model family turns
that text, as it comes, into the parts below; every API then writes the same parts in its own way.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextPart:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; calls of a choice are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments (JSON text) of the call that began last."""

    index: int
    text: str


Part = TextPart | ReasoningPart | ToolCallStart | ToolCallArguments


class AnswerParser(Protocol):
    """Reads the text of one choice. The parts do not depend on how the text was cut into pieces."""

    def push(self, text: str) -> list[Part]:
        """Parts that are certain after this text; what may be the start of a mark waits."""
        ...

    def finish(self) -> list[Part]:
        """What waited, when no text follows. Text that looked like a call and is none comes out as text."""
        ...

    @property
    def called_tools(self) -> bool:
        """Whether a tool call was begun: such a choice that ended by itself finishes with `tool_calls`."""
        ...
