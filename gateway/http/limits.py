"""How much a body may list. Knows no API.

Checking a body's shape takes the event loop for itself, so that what a list may hold is bounded before its items are
looked at, and the first wrong item ends it: the validator would make a complaint of each of millions.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema

#: Messages of a chat, items of an input.
MAX_MESSAGES = 4096
#: Parts of one message, and of anything else that has parts.
MAX_PARTS = 1024
#: Earlier calls in one message.
MAX_CALLS = 128
#: Tokens of `logit_bias`.
MAX_BIASES = 16_384
#: Brackets that open a list or an object, those in texts included: a text with so many is longer than any context.
MAX_BRACKETS = 200_000


@dataclass(frozen=True, slots=True)
class Bounded:
    """Marks a list or dict field."""

    most: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        schema["fail_fast"] = True
        if self.most is not None:
            schema["max_length"] = self.most
        checked: CoreSchema = schema
        return checked
