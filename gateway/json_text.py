"""JSON inside of requests that is kept as it is: arguments of calls, schemas, and what gRPC has no messages for."""

import json
import math
from typing import Any

#: Values inside values: as many as a body over HTTP may have. What walks such values may do so by recursion.
MAX_DEPTH = 200


def json_object(text: str) -> dict[str, Any] | None:
    """The object; None if the text spells none, or one that no prompt and no answer could show.

    That is: nested too deep, with half of a surrogate pair (no character), or a number with too many digits.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _showable(value) else None


def is_text(text: str) -> bool:
    """Whether all of it are characters: JSON's escapes can also spell halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_finite(value: Any) -> bool:
    """Whether a value that came as JSON can be written as JSON: `1e400` is read as infinity."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, float) and not math.isfinite(item):
            return False
    return True


def _showable(value: dict[str, Any]) -> bool:
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            return False
        if isinstance(item, dict):
            if not all(map(is_text, item)):
                return False
            stack.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, list):
            stack.extend((child, depth + 1) for child in item)
        elif isinstance(item, str) and not is_text(item):
            return False
    return True
