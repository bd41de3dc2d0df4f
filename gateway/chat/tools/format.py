"""The interface of a tool format, and what several of them share."""

import json
import secrets
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from gateway.chat.parts import AnswerParser
from gateway.chat.request import Tool
from gateway.chat.structure import Node
from gateway.json_text import json_object


class ToolFormat(Protocol):
    """How a family of models writes calls."""

    @property
    def name(self) -> str:
        """As in `--tool-parser`."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """What begins, parts or ends calls; where a mark is a special token, its text must reach the parser."""
        ...

    def new_parser(self, names: Collection[str], *, parallel: bool) -> AnswerParser:
        """A parser for one choice.

        Args:
            names: functions that may be called. A marked call of any other is a call all the same: the client sees
                what the model tried.
            parallel: if not, calls after the first are left out.
        """
        ...

    def calls(self, tools: Sequence[Tool], *, parallel: bool) -> Node:
        """Nothing but calls of these functions, one at least, each with arguments that fit its schema.

        Schemas go to the workers as they are.
        """
        ...

    def text_and_calls(self, tools: Sequence[Tool], *, parallel: bool) -> Node:
        """Any text; a call in it is one of these functions with arguments that fit its schema."""
        ...

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls (name, arguments) of one message as the model would write them, for templates that know no tools."""
        ...

    def template_id(self, call_id: str) -> str:
        """A call's id as the family's chat templates want it; equal ids stay equal."""
        ...


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def call_json(name: str, arguments: Any, *, key: str = "arguments") -> str:
    """A call as one JSON object."""
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def parsed_arguments(arguments: str) -> Any:
    """The object that the text spells; the text itself if it spells none."""
    if not arguments.strip():
        return {}
    value = json_object(arguments)
    return arguments if value is None else value


def template_tool(tool: Tool) -> dict[str, Any]:
    """A function as chat templates take it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
