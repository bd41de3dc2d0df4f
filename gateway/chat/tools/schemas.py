"""Schemas of functions' arguments in terms that workers enforce. Knows no format."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.chat.fields import ChatFields
from gateway.chat.request import Tool
from gateway.chat.tools.check import ToolUse
from gateway.structured.json_schema import enforceable_schema

_ANY_OBJECT = {"type": "object"}


def held_tools(tools: Sequence[Tool], use: ToolUse, fields: ChatFields) -> list[Tool]:
    """The functions that may be called, with the schema that their arguments are held to.

    Arguments are an object, whatever else the schema says. A strict function is always held to its schema, whole; what
    cannot be enforced is refused. Another one is held to it where a call is forced, as far as it can be enforced.

    Args:
        tools: all of the request, by whose places they are named in complaints.

    Raises InvalidRequest naming the field.
    """
    wanted = {tool.name for tool in use.callable}
    held = []
    for index, tool in enumerate(tools):
        schema = _ANY_OBJECT
        if tool.strict or (use.required and tool.name in wanted):
            field = f"{fields.tool(index)}{fields.function}.parameters"
            schema = enforceable_schema(_ANY_OBJECT | dict(tool.parameters or {}), field=field, strict=tool.strict)
        if tool.name in wanted:
            held.append(replace(tool, parameters=schema))
    return held
