"""Llama 3: the answer is `{"name": ..., "parameters": {...}}`, several parted by `;`, perhaps behind `<|python_tag|>`.

A bare object is a call only where an answer begins, and only of a function that was offered: the user may have asked
for JSON. What follows calls and is none is text.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.text.marks import PYTHON_TAG
from gateway.chat.parts import AnswerParser
from gateway.chat.request import Tool
from gateway.chat.structure import Node, const_string, optional, schema, sequence, tag, tags, triggered
from gateway.chat.tools.call_parser import CallParser
from gateway.chat.tools.format import call_json, new_call_id
from gateway.chat.tools.reader import JsonCall
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


class Llama3Parser(CallParser):
    """Where a call may begin, in a call, behind one, or in text."""

    def __init__(self, names: Collection[str], writer: PartWriter) -> None:
        super().__init__(writer)
        self._names = names
        #: A call may begin here.
        self._may_call = True
        #: Right behind a call, where a separator may stand.
        self._behind_call = False

    def _advance(self) -> bool:
        if self._behind_call:
            return self._skip_separator()
        if self._may_call:
            return self._look_for_call()
        self._may_call = self._find(PYTHON_TAG)
        return self._may_call

    def _skip_separator(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer.startswith(_SEPARATOR):
            self._buffer, self._lead = self._buffer[1:], _SEPARATOR
        self._behind_call = False
        return True

    def _look_for_call(self) -> bool:
        rest = self._skip_blanks()
        if len(rest) < len(PYTHON_TAG) and PYTHON_TAG.startswith(rest):
            return False
        if rest.startswith(PYTHON_TAG):
            self._lead, self._buffer = self._lead + PYTHON_TAG, rest[len(PYTHON_TAG) :]
        elif rest.startswith("{"):
            self._open(JsonCall(None if PYTHON_TAG in self._lead else self._names))
        else:
            self._show_lead()
            self._may_call = False
        return True

    def _called(self) -> None:
        self._behind_call = True

    def _failed(self, text: str) -> None:
        self._writer.text(text)
        self._may_call = False
