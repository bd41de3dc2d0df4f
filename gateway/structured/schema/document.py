"""A schema document: every subschema by its place, each checked for shape, and references resolved within it."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from gateway.structured.complaints import Complaints, Place
from gateway.structured.limits import MAX_ENUM_VALUES, MAX_NODES, MAX_PROPERTIES
from gateway.structured.schema.dialects import Dialect, dialect_of, modern
from gateway.structured.schema.keywords import KEYWORDS, TYPES, Shape

Schema = Mapping[str, Any] | bool


class Document:
    """Subschemas in the words of 2020-12, by place; all of them are well-formed."""

    def __init__(self, root: Any, complaints: Complaints) -> None:
        """`root`: a JSON value of bounded depth. Raises InvalidRequest for what is no schema."""
        self._root = root
        self._complaints = complaints
        self._schemas: dict[Place, Schema] = {}
        self._anchors: dict[str, Place] = {}
        self._embedded: Place | None = None
        self._properties = self._enum_values = 0
        self._dialect = self._root_dialect(root)
        self._base = self._root_id(root)
        self._collect((), root)

    def schema(self, place: Place) -> Schema:
        return self._schemas[place]

    def add(self, place: Place, schema: Schema) -> None:
        """A schema made of others, under a place that no document has."""
        self._schemas[place] = schema

    def target(self, place: Place, reference: str) -> Place:
        """Where `$ref` at `place` leads. Raises InvalidRequest if out of the document, or nowhere."""
        complain = self._complaints.wrong
        if self._embedded is not None:
            raise complain((*self._embedded, "$id"), "$id below the top is not supported beside references")
        if self._base and reference.startswith(self._base):
            reference = reference[len(self._base) :] or "#"
        if not reference.startswith("#"):
            raise complain((*place, "$ref"), "only references within the schema are supported (#...)")
        fragment = unquote(reference[1:], errors="replace")
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise complain((*place, "$ref"), "leads to an anchor that is not there")
            return self._anchors[fragment]
        return self._at(place, fragment)

    def _root_dialect(self, root: Any) -> Dialect:
        uri = root.get("$schema") if isinstance(root, dict) else None
        if uri is None:
            return Dialect.DRAFT2020
        dialect = dialect_of(uri) if isinstance(uri, str) else None
        if dialect is None:
            raise self._complaints.wrong(("$schema",), "is not a draft that is known: 04, 06, 07, 2019-09 or 2020-12")
        return dialect

    def _root_id(self, root: Any) -> str:
        name = root.get("$id", root.get("id")) if isinstance(root, dict) else None
        return name.partition("#")[0] if isinstance(name, str) else ""

    def _at(self, place: Place, fragment: str) -> Place:
        """Follows a JSON pointer; what it leads to is checked as a schema if it was not one so far."""
        value: Any = self._root
        found: Place = ()
        for part in fragment.split("/")[1:]:
            key: str | int = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and str(key).isdecimal() and len(str(key)) < 10 and int(key) < len(value):
                key = int(key)
            elif not isinstance(value, dict) or key not in value:
                raise self._complaints.wrong((*place, "$ref"), "leads nowhere")
            value = value[key]
            found = (*found, key)
        if found not in self._schemas:
            self._collect(found, value)
        return found

    def _collect(self, place: Place, value: Any) -> None:
        stack = [(place, value)]
        while stack:
            where, schema = stack.pop()
            if not isinstance(schema, dict | bool):
                raise self._complaints.wrong(where, f"must be {Shape.SCHEMA.value}")
            if isinstance(schema, dict):
                self._name(where, schema)
                stack.extend(reversed(list(self._children(where, schema))))
                schema = modern(schema, self._dialect)
                self._check(where, schema)
            self._schemas[where] = schema
            if len(self._schemas) > MAX_NODES + MAX_PROPERTIES:
                raise self._complaints.wrong((), f"has more than {MAX_NODES + MAX_PROPERTIES} subschemas")

    def _name(self, place: Place, schema: Mapping[str, Any]) -> None:
        """Remembers anchors, and whether there is a document in the document."""
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors.setdefault(schema[keyword], place)
        name = schema.get("$id")
        if isinstance(name, str) and place:
            if name.startswith("#") and self._dialect in (Dialect.DRAFT6, Dialect.DRAFT7):
                self._anchors.setdefault(name[1:], place)
            else:
                self._embedded = place
        if place and isinstance(schema.get("$schema"), str) and dialect_of(schema["$schema"]) is not self._dialect:
            raise self._complaints.wrong((*place, "$schema"), "differs from the schema's own")

    def _children(self, place: Place, schema: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
        """Subschemas under the places that they have once the schema is `modern`."""
        old = self._dialect is not Dialect.DRAFT2020
        for keyword, value in schema.items():
            shape = KEYWORDS[keyword].shape if keyword in KEYWORDS else None
            if old and keyword == "items" and isinstance(value, list):
                yield from (((*place, "prefixItems", index), child) for index, child in enumerate(value))
            elif old and keyword == "additionalItems":
                yield (*place, "items"), value
            elif shape is Shape.SCHEMAS and isinstance(value, list):
                yield from (((*place, keyword, index), child) for index, child in enumerate(value))
            elif shape is Shape.SCHEMA:
                yield (*place, keyword), value
            elif shape is Shape.SCHEMA_MAP and isinstance(value, dict):
                yield from (((*place, keyword, name), child) for name, child in value.items())

    def _check(self, place: Place, schema: Mapping[str, Any]) -> None:
        for keyword, value in schema.items():
            if keyword in KEYWORDS and not _fits(value, KEYWORDS[keyword].shape):
                raise self._complaints.wrong((*place, keyword), f"must be {KEYWORDS[keyword].shape.value}")
        self._properties += len(schema.get("properties", ()))
        self._enum_values += len(schema.get("enum", ()))
        if self._properties > MAX_PROPERTIES:
            raise self._complaints.wrong((*place, "properties"), f"there are more than {MAX_PROPERTIES} properties")
        if self._enum_values > MAX_ENUM_VALUES:
            raise self._complaints.wrong((*place, "enum"), f"there are more than {MAX_ENUM_VALUES} enum values")


def _fits(value: Any, shape: Shape) -> bool:
    match shape:
        case Shape.ANYTHING:
            return True
        case Shape.TEXT:
            return isinstance(value, str)
        case Shape.FLAG:
            return isinstance(value, bool)
        case Shape.NUMBER:
            return _is_number(value)
        case Shape.POSITIVE:
            return _is_number(value) and value > 0
        case Shape.COUNT:
            return _is_number(value) and value >= 0 and value == int(value)
        case Shape.TYPES:
            names = [value] if isinstance(value, str) else value
            return _are_names(names) and names != [] and set(names) <= set(TYPES)
        case Shape.NAMES:
            return _are_names(value)
        case Shape.NAME_LISTS:
            return isinstance(value, dict) and all(map(_are_names, value.values()))
        case Shape.VALUES:
            return isinstance(value, list)
        case Shape.SCHEMA:
            return isinstance(value, dict | bool)
        case Shape.SCHEMAS:
            return isinstance(value, list) and value != [] and all(isinstance(item, dict | bool) for item in value)
        case Shape.SCHEMA_MAP:
            return isinstance(value, dict) and all(isinstance(item, dict | bool) for item in value.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value) and len(set(value)) == len(value)
