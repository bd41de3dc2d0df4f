"""Whether the branches of a `oneOf` exclude each other, as far as it can be seen. "No" may mean "not to be seen"."""

from collections.abc import Sequence
from typing import Any

from gateway.structured.limits import MAX_REPEAT
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
from gateway.structured.schema.matching import Matching
from gateway.structured.schema.numbers import MAX_MAGNITUDE, exact
from gateway.structured.schema.objects import apart
from gateway.structured.schema.table import Entry
from gateway.structured.schema.values import number_fits

#: How deep in objects and arrays a difference is looked for.
_DEPTH = 4


class Disjointness:
    """Compares entries of a table, each pair once."""

    def __init__(self, entries: Sequence[Entry], matching: Matching) -> None:
        self._entries = entries
        self._matching = matching
        self._known: dict[tuple[NodeId, NodeId, int], bool] = {}

    def of(self, first: NodeId, second: NodeId, depth: int = _DEPTH) -> bool:
        """Whether no value is valid under both entries' schemas. Judges what the schemas say, not what comes out."""
        key = (min(first, second), max(first, second), depth)
        if key not in self._known:
            self._known[key] = self._compare(first, second, depth)
        return self._known[key]

    def _compare(self, first: NodeId, second: NodeId, depth: int) -> bool:
        one, other = self._entries[first], self._entries[second]
        if first == second or depth == 0 or one.types_implied or other.types_implied:
            return False
        self._matching.spend(10 * len(one.alternatives) * len(other.alternatives))
        return all(self._apart(a, b, depth) for a in one.alternatives for b in other.alternatives)

    def _apart(self, first: Alternative, second: Alternative, depth: int) -> bool:
        match first, second:
            case (Anything(), _) | (_, Anything()):
                return False
            case Values(), Values():
                listed = self._matching.values(second.values)
                return not any(value in listed for value in first.values)
            case Values(), _:
                return not any(self._may_be(second, value) for value in first.values)
            case _, Values():
                return not any(self._may_be(first, value) for value in second.values)
            case Constant(), Constant():
                return first.type != second.type
            case Text(), Text():
                return _shorter(first, second) or _shorter(second, first) or apart(first.form, second.form)
            case Number(), Number():
                return _below(first, second) or _below(second, first)
            case Items(), Items():
                return self._items_apart(first, second, depth)
            case Properties(), Properties():
                return self._properties_apart(first, second, depth)
        return True

    def _may_be(self, alternative: Alternative, value: Any) -> bool:
        match alternative:
            case Constant():
                return value is None if alternative.type == "null" else isinstance(value, bool)
            case Text():
                return isinstance(value, str) and self._text_may_be(alternative, value)
            case Number():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                return is_number and (abs(exact(value)) > MAX_MAGNITUDE or number_fits(alternative, value))
            case Items():
                return isinstance(value, list)
            case Properties():
                return isinstance(value, dict)
        return True

    def _text_may_be(self, text: Text, value: str) -> bool:
        self._matching.spend(10 * len(value))
        if len(value) > MAX_REPEAT:
            return True
        return self._matching.fits(text, value)

    def _items_apart(self, first: Items, second: Items, depth: int) -> bool:
        for one, other in ((first, second), (second, first)):
            if one.high is not None and one.high < min(other.low, MAX_REPEAT):
                return True
        shared = min(len(first.first), len(second.first), first.low, second.low)
        return any(self.of(first.first[index], second.first[index], depth - 1) for index in range(shared))

    def _properties_apart(self, first: Properties, second: Properties, depth: int) -> bool:
        for one, other in ((first, second), (second, first)):
            if other.sealed is not None and not one.required <= other.sealed:
                return True
        shared = sorted(first.required & second.required)
        return any(self.of(first.named[name], second.named[name], depth - 1) for name in shared)


def _shorter(first: Text, second: Text) -> bool:
    return first.high is not None and first.high < second.low


def _below(first: Number, second: Number) -> bool:
    if first.high is None or second.low is None or max(abs(first.high), abs(second.low)) >= MAX_MAGNITUDE:
        return False
    high, low = exact(first.high), exact(second.low)
    return high < low or (high == low and (first.below_high or second.above_low))
