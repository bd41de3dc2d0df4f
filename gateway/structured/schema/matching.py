"""Compares values and names with what a schema allows, within a bounded amount of work for each request."""

from collections.abc import Iterable
from typing import Any

from gateway.structured.complaints import Complaints
from gateway.structured.json_values import equal
from gateway.structured.limits import MAX_COMPARISONS
from gateway.structured.regex.forms import positions
from gateway.structured.regex.match import Automaton
from gateway.structured.regex.tree import Node
from gateway.structured.schema.alternatives import Text


class Matching:
    """Raises InvalidRequest, from any method, once a schema has taken too much."""

    def __init__(self, complaints: Complaints) -> None:
        self._complaints = complaints
        self._left = MAX_COMPARISONS
        #: By the identity of their trees, which are kept with them.
        self._automata: dict[int, tuple[Node, Automaton, int]] = {}

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise self._complaints.wrong((), "is too complex")

    def matches(self, form: Node, text: str) -> bool:
        if id(form) not in self._automata:
            size = positions(form)
            self.spend(size)
            self._automata[id(form)] = (form, Automaton(form), size)
        _, automaton, size = self._automata[id(form)]
        self.spend((len(text) + 1) * size)
        return automaton.matches(text)

    def fits(self, text: Text, value: str) -> bool:
        """Whether a string is of the form and length."""
        if len(value) < text.low or (text.high is not None and len(value) > text.high):
            return False
        return text.form is None or self.matches(text.form, value)

    def values(self, values: Iterable[Any]) -> "ValueSet":
        return ValueSet(self, values)


class ValueSet:
    """JSON values, looked for by JSON's equality."""

    def __init__(self, matching: Matching, values: Iterable[Any]) -> None:
        self._matching = matching
        self._plain: set[tuple[bool, Any]] = set()
        self._compound: list[Any] = []
        for value in values:
            self.add(value)

    def add(self, value: Any) -> None:
        if isinstance(value, list | dict):
            self._compound.append(value)
        else:
            self._plain.add((isinstance(value, bool), value))

    def __contains__(self, value: Any) -> bool:
        self._matching.spend(1)
        if not isinstance(value, list | dict):
            return (isinstance(value, bool), value) in self._plain
        self._matching.spend(10 * len(self._compound))
        return any(equal(value, other) for other in self._compound)
