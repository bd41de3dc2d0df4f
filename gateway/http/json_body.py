"""An answer's JSON as bytes. Knows no API."""

import json
from typing import Any

#: Levels that are written value by value. Below them are tokens' entries, small ones, that the library writes at once.
_LEVELS = 5

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_body(body: dict[str, Any]) -> bytes:
    """As `json.dumps` writes it, but in pieces: it lets no other thread run meanwhile, and an answer with log
    probabilities may be tens of megabytes long."""
    return _written(body, _LEVELS).encode()


def _written(value: Any, levels: int) -> str:
    if levels and isinstance(value, dict):
        return "{" + ",".join(f"{_encode(key)}:{_written(item, levels - 1)}" for key, item in value.items()) + "}"
    if levels and isinstance(value, list):
        return "[" + ",".join(_written(item, levels - 1) for item in value) + "]"
    return _encode(value)
