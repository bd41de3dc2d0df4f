"""JSON values from clients: parsed without deep recursion, and measured before anything walks them."""

import json
import math
from typing import Any

from gateway.structured.complaints import Complaints, Place
from gateway.structured.limits import MAX_DEPTH, MAX_SOURCE_BYTES

_OPENING, _CLOSING = "[{", "]}"
_MAX_DIGITS = 1000


def parse_json(text: str, complaints: Complaints) -> Any:
    """The value; of equal keys the last counts. Raises InvalidRequest: not JSON, too large, nested too deep."""
    if len(text) > MAX_SOURCE_BYTES:
        raise complaints.wrong((), f"is longer than {MAX_SOURCE_BYTES} bytes")
    if _depth(text) > MAX_DEPTH:
        raise complaints.wrong((), f"is nested more than {MAX_DEPTH} deep")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        words = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise complaints.wrong((), f"is not JSON{words}") from error


def check_value(value: Any, complaints: Complaints) -> None:
    """Raises InvalidRequest for a value that is too deep or too large, or that JSON text in UTF-8 cannot say."""
    size = 0
    stack: list[tuple[Any, Place]] = [(value, ())]
    while stack:
        item, place = stack.pop()
        if len(place) > MAX_DEPTH:
            raise complaints.wrong(place[:3], f"is nested more than {MAX_DEPTH} deep")
        if isinstance(item, dict):
            for key, child in item.items():
                size += _text_size(key, place, complaints) + 3
                stack.append((child, (*place, key)))
        elif isinstance(item, list):
            stack.extend((child, (*place, index)) for index, child in enumerate(item))
            size += len(item)
        elif isinstance(item, str):
            size += _text_size(item, place, complaints)
        else:
            _check_number(item, place, complaints)
            size += 1
        if size > MAX_SOURCE_BYTES:
            raise complaints.wrong((), f"is larger than {MAX_SOURCE_BYTES} bytes")


def equal(first: Any, second: Any) -> bool:
    """JSON's equality: 1 is 1.0, but true is not 1. Values no deeper than MAX_DEPTH."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(value, second[key]) for key, value in first.items())
    return bool(first == second)


def _depth(text: str) -> int:
    """Brackets open at once, outside of strings; exact for JSON, and enough for anything else."""
    deepest = depth = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth -= 1
    return deepest


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _text_size(text: str, place: Place, complaints: Complaints) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise complaints.wrong(place[:8], "has half of a surrogate pair, which is no character") from error


def _check_number(value: Any, place: Place, complaints: Complaints) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise complaints.wrong(place, "is beyond what a number can be")
    if isinstance(value, int) and value.bit_length() > _MAX_DIGITS * 4:
        raise complaints.wrong(place, "is beyond what a number can be")
