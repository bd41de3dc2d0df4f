"""Schemas of functions' arguments in terms that workers enforce. Knows no format."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.errors import InvalidRequest
from gateway.chat.fields import ChatFields
from gateway.chat.request import Tool
from gateway.chat.tools.check import ToolUse
from gateway.structured.json_schema import enforceable_schema

_ANY_OBJECT = {"type": "object"}
#: Work on the schemas of one request, after which no further schema is begun.
MAX_SECONDS = 2.0


def held_tools(
    tools: Sequence[Tool], use: ToolUse, fields: ChatFields, *, clock: Callable[[], float] = time.thread_time
) -> list[Tool]:
    """The functions that may be called, with the schema that their arguments are held to.

    Arguments are an object, whatever else the schema says. A strict function is always held to its schema, whole; what
    cannot be enforced is refused. Another one is held to it where a call is forced, as far as it can be enforced.

    Args:
        tools: all of the request, by whose places they are named in complaints.
        clock: seconds that this thread has worked.

    Raises InvalidRequest naming the field.
    """
    deadline = clock() + MAX_SECONDS
    wanted = {tool.name for tool in use.callable}
    held = []
    for index, tool in enumerate(tools):
        schema = _ANY_OBJECT
        if tool.strict or (use.required and tool.name in wanted):
            field = f"{fields.tool(index)}{fields.function}.parameters"
            if clock() > deadline:
                raise InvalidRequest(f"{field}: the schemas of all tools together are too complex", field=field)
            schema = enforceable_schema(_ANY_OBJECT | dict(tool.parameters or {}), field=field, strict=tool.strict)
        if tool.name in wanted:
            held.append(replace(tool, parameters=schema))
    return held
