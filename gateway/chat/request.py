"""A chat request as values, the same for every API (chat completions, responses, gRPC). Knows no API and no tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    #: JSON text, as the model wrote it.
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as the client sent it; text parts are already joined."""

    role: str | None
    #: None: absent or null, which is allowed beside tool calls only.
    content: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    #: Of a `tool` message: the call that it answers.
    tool_call_id: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    #: JSON schema of the arguments; None: any object.
    parameters: Mapping[str, Any] | None = None
    #: The arguments are held to the schema whenever the model calls it.
    strict: bool = False


class ToolMode(Enum):
    """Whether the model calls tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`function` names the one that must be called; the mode is then REQUIRED."""

    mode: ToolMode = ToolMode.AUTO
    function: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """What of a chat request makes its prompt and decides how its answer is read."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    #: None: AUTO with tools, else NONE.
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    #: Further variables for the template.
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    #: None: unless the final message is continued.
    add_generation_prompt: bool | None = None
    #: The answer goes on where the last message, an assistant's, ends.
    continue_final_message: bool = False
    #: Whether reasoning is told apart from the answer; if not it stays in the text.
    separate_reasoning: bool = True
