"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name[ARGS]{...}` of newer models.

Either form is read, whichever is asked for; what is neither is given back as text, the mark included.
"""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.text.marks import ARGS, CALL_ID, TOOL_CALLS
from gateway.chat.parts import AnswerParser
from gateway.chat.request import Tool
from gateway.chat.structure import Node, const_string, optional, regex, schema, sequence, tag, tags, triggered
from gateway.chat.tools.call_parser import CallParser
from gateway.chat.tools.format import call_json
from gateway.chat.tools.reader import JsonCall, NamedCall
from gateway.chat.tools.writer import PartWriter

#: The templates refuse ids of any other form.
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class MistralFormat:
    """See the module.

    Attributes:
        named: the model writes the newer form.
        with_ids: it writes an id between a call's name and its arguments, which is read over.
    """

    named: bool = False
    with_ids: bool = False
    name: str = "mistral"
    marks: Sequence[str] = (TOOL_CALLS, ARGS, CALL_ID)

    def new_parser(self, names: Collection[str], *, parallel: bool) -> AnswerParser:
        return MistralParser(PartWriter(_new_id, parallel=parallel))

    def calls(self, tools: Sequence[Tool], *, parallel: bool) -> Node:
        if self.named:
            return tags(self._named_tags(tools), "", one=not parallel)
        return _list_tag(tools, parallel=parallel)

    def text_and_calls(self, tools: Sequence[Tool], *, parallel: bool) -> Node:
        if self.named:
            return triggered([TOOL_CALLS], self._named_tags(tools), one=not parallel)
        return triggered([TOOL_CALLS], [_list_tag(tools, parallel=parallel)], one=not parallel)

    def _named_tags(self, tools: Sequence[Tool]) -> list[Node]:
        return [_named_tag(tool, with_id=self.with_ids) for tool in tools]

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        if self.named:
            return "".join(f"{TOOL_CALLS}{name}{ARGS}{json.dumps(value, ensure_ascii=False)}" for name, value in calls)
        return f"{TOOL_CALLS}[{', '.join(call_json(*call) for call in calls)}]"

    def template_id(self, call_id: str) -> str:
        """Ids of other services become nine letters too, the same ones each time."""
        if _ID.fullmatch(call_id):
            return call_id
        digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()
        return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[:9])


def _new_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def _named_tag(tool: Tool, *, with_id: bool) -> Node:
    arguments = sequence(const_string(ARGS), schema(tool.parameters))
    if with_id:
        arguments = sequence(optional(sequence(const_string(CALL_ID), regex(_ID.pattern))), arguments)
    return tag(f"{TOOL_CALLS}{tool.name}", arguments, "")


def _list_tag(tools: Sequence[Tool], *, parallel: bool) -> Node:
    items = [tag(f'{{"name": {json.dumps(tool.name)}, "arguments": ', schema(tool.parameters), "}") for tool in tools]
    # Some tokenizers have a token for the bracket with the space that the templates put before it.
    return tag(TOOL_CALLS, sequence(regex(r" ?\["), tags(items, ", ", one=not parallel)), "]")


class MistralParser(CallParser):
    """In text, behind the mark, in a list of calls, or in a call."""

    def __init__(self, writer: PartWriter) -> None:
        super().__init__(writer)
        #: A call may begin here.
        self._may_call = False
        self._in_list = False
        #: Behind a call of a list.
        self._behind_item = False

    def _advance(self) -> bool:
        if self._behind_item:
            return self._skip_separator()
        if self._may_call:
            return self._look_for_call()
        self._may_call = self._find(TOOL_CALLS)
        return self._may_call

    def _look_for_call(self) -> bool:
        rest = self._skip_blanks()
        if not rest:
            return False
        first = rest[0]
        if first == "{":
            self._open(JsonCall())
        elif first == "[" and not self._in_list:
            self._buffer, self._lead, self._in_list = rest[1:], self._lead + "[", True
        elif not self._in_list and (first.isalnum() or first in "_.-"):
            self._open(NamedCall())
        else:
            self._leave()
        return True

    def _skip_separator(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._behind_item = False
        if self._buffer[0] == ",":
            self._buffer, self._lead = self._buffer[1:], ","
            return True
        self._buffer = self._buffer.removeprefix("]")
        self._leave()
        return True

    def _called(self) -> None:
        self._behind_item = self._may_call = self._in_list

    def _failed(self, text: str) -> None:
        self._lead = text
        self._leave()

    def _leave(self) -> None:
        """No call follows: what led to it is text."""
        self._show_lead()
        self._may_call = self._in_list = False
