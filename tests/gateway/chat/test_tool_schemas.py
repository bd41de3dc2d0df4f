"""Schemas of tools: what all of them together may cost."""

from itertools import count

import pytest

from common.errors import InvalidRequest
from gateway.chat.fields import ChatFields
from gateway.chat.request import Tool
from gateway.chat.tools.check import ToolUse
from gateway.chat.tools.schemas import held_tools

TOOLS = tuple(Tool(f"f{index}", parameters={"type": "object"}, strict=True) for index in range(5))


def test_schemas_of_one_request_share_their_time() -> None:
    clock = count()
    with pytest.raises(InvalidRequest, match="together") as caught:
        held_tools(TOOLS, ToolUse(TOOLS, callable=TOOLS), ChatFields(), clock=lambda: next(clock))
    assert caught.value.field == "tools[2].function.parameters"


def test_within_the_time_all_are_held() -> None:
    held = held_tools(TOOLS, ToolUse(TOOLS, callable=TOOLS), ChatFields(), clock=lambda: 0.0)
    assert [tool.name for tool in held] == [tool.name for tool in TOOLS]
