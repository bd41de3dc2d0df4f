"""`enum` and `const` of schemas that hold together: the values that the rest of them lets pass."""

from collections.abc import Sequence
from typing import Any

from gateway.structured.complaints import Complaints, Place
from gateway.structured.schema.alternatives import Alternative, Constant, Items, Number, Properties, Text, Values
from gateway.structured.schema.branches import Branch
from gateway.structured.schema.matching import Matching
from gateway.structured.schema.numbers import exact

_MAX_WHOLE = 2**63 - 1


def narrowed(
    branch: Branch,
    alternatives: Sequence[Alternative],
    types: Sequence[str],
    complaints: Complaints,
    matching: Matching,
) -> Values | None:
    """The values of `enum` and `const` that the alternatives of these types allow; None if none are listed."""
    lists: list[tuple[Place, list[Any]]] = []
    for member in branch:
        if "enum" in member.schema:
            lists.append(((*member.place, "enum"), member.schema["enum"]))
        if "const" in member.schema:
            lists.append(((*member.place, "const"), [member.schema["const"]]))
    if not lists:
        return None
    place, candidates = min(lists, key=lambda entry: len(entry[1]))
    others = [matching.values(values) for _, values in lists if values is not candidates]
    kept: list[Any] = []
    seen = matching.values(())
    for value in candidates:
        matching.spend(10 * (1 + len(alternatives)))
        if value in seen or not all(value in other for other in others) or not _type_of(value, types):
            continue
        if any(_allows(option, value, matching) for option in alternatives) and _sayable(value, place, complaints):
            kept.append(value)
            seen.add(value)
    return Values(tuple(kept))


def _type_of(value: Any, types: Sequence[str]) -> bool:
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and exact(value).denominator == 1)
    if isinstance(value, str):
        return "string" in types
    return ("array" if isinstance(value, list) else "object") in types


def _allows(alternative: Alternative, value: Any, matching: Matching) -> bool:
    """Of objects and arrays only the type is looked at."""
    match alternative:
        case Constant():
            return value is None if alternative.type == "null" else isinstance(value, bool)
        case Text():
            return isinstance(value, str) and matching.fits(alternative, value)
        case Number():
            return isinstance(value, int | float) and not isinstance(value, bool) and number_fits(alternative, value)
        case Items():
            return isinstance(value, list)
        case Properties():
            return isinstance(value, dict)
    return True


def number_fits(number: Number, value: float) -> bool:
    """Whether a value is in range."""
    exactly = exact(value)
    if number.whole and exactly.denominator != 1:
        return False
    if number.multiple is not None and exactly % number.multiple:
        return False
    if number.low is not None and (exactly < exact(number.low) or (number.above_low and exactly == exact(number.low))):
        return False
    return number.high is None or not (
        exactly > exact(number.high) or (number.below_high and exactly == exact(number.high))
    )


def _sayable(value: Any, place: Place, complaints: Complaints) -> bool:
    """Whether the compiler writes the value as it is: it knows no whole numbers beyond 64 bits."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, int) and abs(item) > _MAX_WHOLE:
            complaints.unenforced(place, "a whole number beyond 64 bits")
            return False
    return True
