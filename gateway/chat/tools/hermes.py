"""Hermes, Qwen and models that know no tools of their own: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Text that is no such object is given back as text, marks included. Once the name is known and the arguments have begun
it is a call: what follows them inside the marks is left out, a missing end mark or bracket is forgiven.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.text.marks import END_TOOL_CALL, TOOL_CALL
from gateway.chat.parts import AnswerParser, Part
from gateway.chat.request import Tool
from gateway.chat.structure import Node, schema, tag, tags, triggered
from gateway.chat.tools.format import call_json, new_call_id
from gateway.chat.tools.open_call import OpenCall
from gateway.chat.tools.reader import JsonCall, held_suffix
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


class HermesParser:
    """In text, in a call, or behind one; `_buffer` is what was not understood yet."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._buffer = ""
        self._call: OpenCall | None = None
        self._behind_call = False

    @property
    def called_tools(self) -> bool:
        return self._writer.num_calls > 0

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        while self._advance():
            pass
        return self._writer.take()

    def finish(self) -> list[Part]:
        if self._call is not None:
            self._call.end()
            self._settle(self._call)
        if not self._behind_call:
            self._writer.text(self._buffer)
        self._writer.finish()
        return self._writer.take()

    def _advance(self) -> bool:
        """Whether there is more to understand."""
        if self._behind_call:
            return self._skip_end()
        return self._look_for_call() if self._call is None else self._read(self._call)

    def _look_for_call(self) -> bool:
        before, mark, after = self._buffer.partition(TOOL_CALL)
        if mark:
            self._writer.text(before)
            self._buffer, self._call = after, OpenCall(JsonCall(), self._writer, TOOL_CALL)
            return True
        shown = len(self._buffer) - held_suffix(self._buffer, TOOL_CALL)
        self._writer.text(self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        return False

    def _read(self, call: OpenCall) -> bool:
        self._buffer = self._buffer[call.feed(self._buffer, end_mark=END_TOOL_CALL) :]
        if self._buffer.startswith(END_TOOL_CALL):
            call.end()
        if call.over:
            self._settle(call)
        return call.over

    def _settle(self, call: OpenCall) -> None:
        self._call = None
        if not call.failed:
            self._behind_call = True
            return
        text = call.text
        if text.endswith("<"):  # it may begin a mark of its own
            text, self._buffer = text[:-1], "<" + self._buffer
        self._writer.text(text)

    def _skip_end(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if len(self._buffer) < len(END_TOOL_CALL) and END_TOOL_CALL.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(END_TOOL_CALL)
        self._behind_call = False
        return True
