"""Writes a table of alternatives as a JSON schema that the grammar compiler enforces as it stands.

What it minds of the compiler (xgrammar 0.2.9): keywords beside `$ref`, `enum`, `anyOf` are ignored, and so are names in
`required` that `properties` lacks; names of further properties could be spelled with escapes to repeat a declared one,
unless a pattern says what they are; schemas that differ only in properties called like an annotation (`title`,
`default`, ...) count as the same, unless an anchor tells them apart.
"""

from collections.abc import Sequence
from typing import Any

from gateway.structured.regex.escapes import bearable
from gateway.structured.regex.render import as_pattern
from gateway.structured.schema.alternatives import (
    Alternative,
    Constant,
    Items,
    NodeId,
    Number,
    Properties,
    Text,
    Values,
)
from gateway.structured.schema.table import Entry, children


def emit(entries: Sequence[Entry], root: NodeId) -> dict[str, Any]:
    """The schema of `root`; what is used in several places becomes a definition.

    Args:
        entries: cleared of what no value fits; `root` has alternatives.
    """
    return _Writer(entries, root).write()


class _Writer:
    def __init__(self, entries: Sequence[Entry], root: NodeId) -> None:
        self._entries = entries
        self._root = root
        self._reached, self._inline = _reached(entries, root)
        self._bodies: dict[NodeId, dict[str, Any]] = {node: {} for node in self._reached}
        self._anchors = 0

    def write(self) -> dict[str, Any]:
        for node in self._reached:
            self._bodies[node].update(self._schema(self._entries[node].alternatives))
        definitions = {_name(node): self._bodies[node] for node in self._reached if node not in self._inline}
        if not definitions:
            return self._bodies[self._root]
        return {**self._use(self._root), "$defs": definitions}

    def _use(self, node: NodeId) -> dict[str, Any]:
        """The place itself, or a reference to it."""
        return self._bodies[node] if node in self._inline else {"$ref": f"#/$defs/{_name(node)}"}

    def _schema(self, alternatives: Sequence[Alternative]) -> dict[str, Any]:
        written = [self._alternative(alternative) for alternative in alternatives]
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _alternative(self, alternative: Alternative) -> dict[str, Any]:
        match alternative:
            case Values():
                return self._values(alternative)
            case Constant():
                return {"type": alternative.type}
            case Text():
                return _text(alternative)
            case Number():
                return _number(alternative)
            case Items():
                return self._items(alternative)
            case Properties():
                return self._properties(alternative)
        return {}

    def _values(self, values: Values) -> dict[str, Any]:
        listed = [_plain(value) for value in values.values]
        schema = {"const": listed[0]} if len(listed) == 1 else {"enum": listed}
        return self._told_apart(schema) if any(isinstance(value, dict | list) for value in listed) else schema

    def _items(self, items: Items) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if items.first:
            schema["prefixItems"] = [self._use(node) for node in items.first]
        schema["items"] = False if items.rest is None else self._use(items.rest)
        if items.low:
            schema["minItems"] = items.low
        if items.high is not None:
            schema["maxItems"] = items.high
        return schema

    def _properties(self, properties: Properties) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"}
        if properties.named:
            schema["properties"] = {name: self._use(node) for name, node in properties.named.items()}
        if properties.required:
            schema["required"] = [name for name in properties.named if name in properties.required]
        free = [node for form, node in properties.others if form is None]
        patterns = {as_pattern(form): self._use(node) for form, node in properties.others if form is not None}
        if patterns:
            schema["patternProperties"] = patterns
        schema["additionalProperties"] = self._use(free[0]) if free else False
        if properties.low:
            schema["minProperties"] = properties.low
        if properties.high is not None:
            schema["maxProperties"] = properties.high
        return self._told_apart(schema)

    def _told_apart(self, schema: dict[str, Any]) -> dict[str, Any]:
        self._anchors += 1
        return {"$anchor": f"a{self._anchors}", **schema}


def _reached(entries: Sequence[Entry], root: NodeId) -> tuple[list[NodeId], set[NodeId]]:
    """Places that the root leads to, and those of them that are written where they are used.

    Those lie within the place that uses them, and nowhere else: no deeper than the client's own schema.
    """
    reached = [root]
    users: dict[NodeId, list[NodeId]] = {root: []}
    for node in reached:
        for alternative in entries[node].alternatives:
            for child in children(alternative):
                if child not in users:
                    users[child] = []
                    reached.append(child)
                users[child].append(node)
    inline = {root} if not users[root] else set()
    for node in reached:
        if _is_basic(entries[node]) or (len(users[node]) == 1 and _within(entries[node], entries[users[node][0]])):
            inline.add(node)
    return reached, inline


def _is_basic(entry: Entry) -> bool:
    return not any(children(alternative) for alternative in entry.alternatives) and len(entry.alternatives) == 1


def _within(entry: Entry, user: Entry) -> bool:
    return bool(entry.places) and all(
        any(len(place) > len(outer) and place[: len(outer)] == outer for outer in user.places) for place in entry.places
    )


def _name(node: NodeId) -> str:
    return f"n{node}"


def _text(text: Text) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if text.form is not None:
        schema["pattern"] = as_pattern(bearable(text.form))
    if text.low:
        schema["minLength"] = text.low
    if text.high is not None:
        schema["maxLength"] = text.high
    return schema


def _number(number: Number) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer" if number.whole else "number"}
    if number.low is not None:
        schema["exclusiveMinimum" if number.above_low else "minimum"] = number.low
    if number.high is not None:
        schema["exclusiveMaximum" if number.below_high else "maximum"] = number.high
    if number.multiple is not None:
        schema["multipleOf"] = number.multiple
    return schema


def _plain(value: Any) -> Any:
    """Whole numbers without a point, as the compiler writes them."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
