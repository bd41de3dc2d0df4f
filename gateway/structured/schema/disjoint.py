"""Whether the branches of a `oneOf` exclude each other, as far as it can be seen. "No" may mean "not to be seen"."""

from collections.abc import Sequence
from typing import Any

from gateway.structured.json_values import equal
from gateway.structured.limits import MAX_REPEAT
from gateway.structured.regex.forms import JSON_RANGES, only
from gateway.structured.regex.tree import NOTHING, literal
from gateway.structured.schema.alternatives import (
    Alternative,
    Anything,
    Constant,
    Items,
    NodeId,
    Number,
    Properties,
    Text,
    Values,
)
from gateway.structured.schema.numbers import MAX_MAGNITUDE, exact
from gateway.structured.schema.objects import apart
from gateway.structured.schema.table import Entry
from gateway.structured.schema.values import matches, number_fits

#: How deep in objects and arrays a difference is looked for.
_DEPTH = 4


def disjoint(entries: Sequence[Entry], first: NodeId, second: NodeId, depth: int = _DEPTH) -> bool:
    """Whether no value is valid under both entries' schemas. Judges what the schemas say, not what comes out."""
    if first == second or depth == 0:
        return False
    if entries[first].types_implied or entries[second].types_implied:
        return False
    return all(
        _apart(entries, one, other, depth)
        for one in entries[first].alternatives
        for other in entries[second].alternatives
    )


def _apart(entries: Sequence[Entry], first: Alternative, second: Alternative, depth: int) -> bool:
    match first, second:
        case (Anything(), _) | (_, Anything()):
            return False
        case Values(), Values():
            return not any(equal(one, other) for one in first.values for other in second.values)
        case Values(), _:
            return not any(_may_be(second, value) for value in first.values)
        case _, Values():
            return not any(_may_be(first, value) for value in second.values)
        case Constant(), Constant():
            return first.type != second.type
        case Text(), Text():
            return _lengths_apart(first, second) or apart(first.form, second.form)
        case Number(), Number():
            return _below(first, second) or _below(second, first)
        case Items(), Items():
            return _items_apart(entries, first, second, depth)
        case Properties(), Properties():
            return _properties_apart(entries, first, second, depth)
    return True


def _may_be(alternative: Alternative, value: Any) -> bool:
    match alternative:
        case Constant():
            return value is None if alternative.type == "null" else isinstance(value, bool)
        case Text():
            return isinstance(value, str) and _text_may_be(alternative, value)
        case Number():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and (abs(exact(value)) > MAX_MAGNITUDE or number_fits(alternative, value))
        case Items():
            return isinstance(value, list)
        case Properties():
            return isinstance(value, dict)
    return True


def _text_may_be(text: Text, value: str) -> bool:
    if only(literal(value), JSON_RANGES) == NOTHING or len(value) > MAX_REPEAT:
        return True
    if len(value) < text.low or (text.high is not None and len(value) > text.high):
        return False
    return text.form is None or matches(text.form, value)


def _lengths_apart(first: Text, second: Text) -> bool:
    return _shorter(first, second) or _shorter(second, first)


def _shorter(first: Text, second: Text) -> bool:
    return first.high is not None and first.high < second.low


def _below(first: Number, second: Number) -> bool:
    if first.high is None or second.low is None or max(abs(first.high), abs(second.low)) >= MAX_MAGNITUDE:
        return False
    high, low = exact(first.high), exact(second.low)
    return high < low or (high == low and (first.below_high or second.above_low))


def _items_apart(entries: Sequence[Entry], first: Items, second: Items, depth: int) -> bool:
    for one, other in ((first, second), (second, first)):
        if one.high is not None and one.high < min(other.low, MAX_REPEAT):
            return True
    shared = min(len(first.first), len(second.first), first.low, second.low)
    return any(disjoint(entries, first.first[index], second.first[index], depth - 1) for index in range(shared))


def _properties_apart(entries: Sequence[Entry], first: Properties, second: Properties, depth: int) -> bool:
    for one, other in ((first, second), (second, first)):
        if other.sealed is not None and not one.required <= other.sealed:
            return True
    return any(
        disjoint(entries, first.named[name], second.named[name], depth - 1)
        for name in sorted(first.required & second.required)
    )
