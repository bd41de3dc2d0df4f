"""Hermes, Qwen and models that know no tools of their own: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Text that is no such object is given back as text, marks included. Once the name is known and the arguments have begun
it is a call: what follows them inside the marks is left out, a missing end mark or bracket is forgiven.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.text.marks import END_TOOL_CALL, TOOL_CALL
from gateway.chat.parts import AnswerParser
from gateway.chat.request import Tool
from gateway.chat.structure import Node, schema, tag, tags, triggered
from gateway.chat.tools.call_parser import CallParser
from gateway.chat.tools.format import call_json, new_call_id
from gateway.chat.tools.reader import JsonCall
from gateway.chat.tools.writer import PartWriter


@dataclass(frozen=True, slots=True)
class HermesFormat:
    """See the module."""

    name: str = "hermes"
    marks: Sequence[str] = (TOOL_CALL, END_TOOL_CALL)

    def new_parser(self, names: Collection[str], *, parallel: bool) -> AnswerParser:
        return HermesParser(PartWriter(new_call_id, parallel=parallel))

    def calls(self, tools: Sequence[Tool], *, parallel: bool) -> Node:
        return tags([_tag(tool) for tool in tools], "\n", one=not parallel)

    def text_and_calls(self, tools: Sequence[Tool], *, parallel: bool) -> Node:
        return triggered([TOOL_CALL], [_tag(tool) for tool in tools], one=not parallel)

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "\n".join(f"{TOOL_CALL}\n{call_json(*call)}\n{END_TOOL_CALL}" for call in calls)

    def template_id(self, call_id: str) -> str:
        return call_id


def _tag(tool: Tool) -> Node:
    begin = f'{TOOL_CALL}\n{{"name": {json.dumps(tool.name)}, "arguments": '
    return tag(begin, schema(tool.parameters), f"}}\n{END_TOOL_CALL}")


class HermesParser(CallParser):
    """In text, in a call, or behind one."""

    end_mark = END_TOOL_CALL

    def __init__(self, writer: PartWriter) -> None:
        super().__init__(writer)
        self._behind_call = False

    def _advance(self) -> bool:
        if self._behind_call:
            return self._skip_end()
        if not self._find(TOOL_CALL):
            return False
        self._open(JsonCall())
        return True

    def _skip_end(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if len(self._buffer) < len(END_TOOL_CALL) and END_TOOL_CALL.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(END_TOOL_CALL)
        self._behind_call = False
        return True

    def _called(self) -> None:
        self._behind_call = True

    def _failed(self, text: str) -> None:
        if text.endswith("<"):  # it may begin a mark of its own
            text, self._buffer = text[:-1], "<" + self._buffer
        self._writer.text(text)

    def _rest(self) -> str:
        return "" if self._behind_call else self._buffer
