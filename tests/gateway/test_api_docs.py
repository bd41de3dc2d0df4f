"""The table of fields in docs/api.md is whole: what the schemas list and what is refused by name stands in it."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from gateway.http import refused
from gateway.http.responses.schemas import ResponseBody
from gateway.http.schemas import ChatCompletionBody, ChatMessage, CompletionBody
from gateway.http.tokenize import DetokenizeBody, TokenizeBody

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
#: Words of names in code quotes: `messages[].tool_calls` speaks of `messages` and of `tool_calls`.
NAMED = {word for quoted in re.findall(r"`([^`\n]+)`", DOCUMENT) for word in re.findall(r"[a-z_]+", quoted)}
SCHEMAS = (ChatCompletionBody, ChatMessage, CompletionBody, ResponseBody, TokenizeBody, DetokenizeBody)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_field_is_documented(schema: type[BaseModel]) -> None:
    assert set(schema.model_fields) - NAMED == set()


def test_every_refused_field_is_documented() -> None:
    assert set(refused.NEUTRAL) - NAMED == set()
