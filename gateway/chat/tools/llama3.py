"""Llama 3: the answer is `{"name": ..., "parameters": {...}}`, several parted by `;`, perhaps behind `<|python_tag|>`.

A bare object is a call only where an answer begins, and only of a function that was offered: the user may have asked
for JSON. What follows calls and is none is text.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.text.marks import PYTHON_TAG
from gateway.chat.parts import AnswerParser, Part
from gateway.chat.request import Tool
from gateway.chat.structure import Node, const_string, optional, schema, sequence, tag, tags, triggered
from gateway.chat.tools.format import call_json, new_call_id
from gateway.chat.tools.open_call import OpenCall
from gateway.chat.tools.reader import JsonCall, held_suffix
from gateway.chat.tools.writer import PartWriter

_SEPARATOR = ";"


@dataclass(frozen=True, slots=True)
class Llama3Format:
    """See the module."""

    name: str = "llama3"
    marks: Sequence[str] = (PYTHON_TAG,)

    def new_parser(self, names: Collection[str], *, parallel: bool) -> AnswerParser:
        return Llama3Parser(names, PartWriter(new_call_id, parallel=parallel))

    def calls(self, tools: Sequence[Tool], *, parallel: bool) -> Node:
        bare = tags([_tag(tool) for tool in tools], "; ", one=not parallel)
        return sequence(optional(const_string(PYTHON_TAG)), bare)

    def text_and_calls(self, tools: Sequence[Tool], *, parallel: bool) -> Node:
        # Behind the mark an object is a call however it is written.
        marked = [_tag(tool, lead=PYTHON_TAG) for tool in tools]
        bare = [_tag(tool) for tool in tools]
        return triggered([PYTHON_TAG, *map(_begin, tools)], [*marked, *bare], one=not parallel)

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "; ".join(call_json(*call, key="parameters") for call in calls)

    def template_id(self, call_id: str) -> str:
        return call_id


def _begin(tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "parameters": '


def _tag(tool: Tool, *, lead: str = "") -> Node:
    return tag(lead + _begin(tool), schema(tool.parameters), "}")


class Llama3Parser:
    """Where a call may begin, in a call, or in text; `_buffer` is what was not understood yet."""

    def __init__(self, names: Collection[str], writer: PartWriter) -> None:
        self._names = names
        self._writer = writer
        self._buffer = ""
        self._call: OpenCall | None = None
        #: A call may begin here.
        self._may_call = True
        #: Right behind a call, where a separator may stand.
        self._behind_call = False
        #: Marks, separators and blanks that are text unless a call follows.
        self._lead = ""

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
        self._writer.text(self._lead + self._buffer)
        self._writer.finish()
        return self._writer.take()

    def _advance(self) -> bool:
        """Whether there is more to understand."""
        if self._call is not None:
            return self._read(self._call)
        if self._behind_call:
            return self._skip_separator()
        return self._look_for_call() if self._may_call else self._look_for_mark()

    def _skip_separator(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer.startswith(_SEPARATOR):
            self._buffer, self._lead = self._buffer[1:], _SEPARATOR
        self._behind_call = False
        return True

    def _look_for_call(self) -> bool:
        rest = self._buffer.lstrip()
        self._lead += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if len(rest) < len(PYTHON_TAG) and PYTHON_TAG.startswith(rest):
            return False
        if rest.startswith(PYTHON_TAG):
            self._lead, self._buffer = self._lead + PYTHON_TAG, rest[len(PYTHON_TAG) :]
        elif rest.startswith("{"):
            reader = JsonCall(None if PYTHON_TAG in self._lead else self._names)
            self._call = OpenCall(reader, self._writer, self._lead)
            self._lead = ""
        else:
            self._writer.text(self._lead)
            self._lead, self._may_call = "", False
        return True

    def _look_for_mark(self) -> bool:
        before, mark, after = self._buffer.partition(PYTHON_TAG)
        if mark:
            self._writer.text(before)
            self._buffer, self._lead, self._may_call = after, PYTHON_TAG, True
            return True
        shown = len(self._buffer) - held_suffix(self._buffer, PYTHON_TAG)
        self._writer.text(self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        return False

    def _read(self, call: OpenCall) -> bool:
        self._buffer = self._buffer[call.feed(self._buffer) :]
        if call.over:
            self._settle(call)
        return call.over

    def _settle(self, call: OpenCall) -> None:
        self._call = None
        self._behind_call = not call.failed
        if call.failed:
            self._writer.text(call.text)
            self._may_call = False
