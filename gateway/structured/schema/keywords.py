"""The keywords of JSON schemas: what their values must be, and how far they are enforced. Data; read by the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Shape(Enum):
    """What a keyword's value must be."""

    ANYTHING = "any value"
    TEXT = "a string"
    FLAG = "true or false"
    COUNT = "a whole number, not negative"
    NUMBER = "a number"
    POSITIVE = "a number above 0"
    TYPES = "a type, or a non-empty list of different types"
    NAMES = "a list of different strings"
    NAME_LISTS = "an object of lists of different strings"
    VALUES = "a list"
    SCHEMA = "a schema (an object, true or false)"
    SCHEMAS = "a non-empty list of schemas"
    SCHEMA_MAP = "an object of schemas"


class Support(Enum):
    """How far a keyword is enforced."""

    #: All that comes out keeps to it.
    FULL = "yes"
    #: Within what the remark says; beyond that it is refused if strict and else left out.
    PARTLY = "partly"
    #: Refused if strict, else left out.
    NOT = "no"
    #: Says nothing about what is valid.
    ANNOTATION = "says nothing"


@dataclass(frozen=True, slots=True)
class Keyword:
    """One keyword; `about` is the type whose values it speaks of, if it is one."""

    shape: Shape
    support: Support
    about: str | None = None
    remark: str = ""


_FULL, _PARTLY, _NOT, _ANNOTATION = Support.FULL, Support.PARTLY, Support.NOT, Support.ANNOTATION

KEYWORDS: Mapping[str, Keyword] = {
    "type": Keyword(Shape.TYPES, _FULL, None, "without it: the types that the other keywords speak of"),
    "enum": Keyword(Shape.VALUES, _PARTLY, None, "whole numbers within 64 bits; objects and arrays only beside `type`"),
    "const": Keyword(Shape.ANYTHING, _PARTLY, None, "as `enum`"),
    "properties": Keyword(Shape.SCHEMA_MAP, _FULL, "object", "come in the order in which they are listed"),
    "required": Keyword(Shape.NAMES, _FULL, "object"),
    "additionalProperties": Keyword(
        Shape.SCHEMA, _FULL, "object", "without it, no others if any are named; others come last, names without escapes"
    ),
    "patternProperties": Keyword(
        Shape.SCHEMA_MAP, _FULL, "object", "no others beside them; see `pattern`; names that are declared do not match"
    ),
    "propertyNames": Keyword(Shape.SCHEMA, _PARTLY, "object", "only by what is enforced of strings"),
    "unevaluatedProperties": Keyword(Shape.SCHEMA, _FULL, "object", "as if no other branch of an `anyOf` were met"),
    "minProperties": Keyword(
        Shape.COUNT, _PARTLY, "object", "above 1 only if so many are named, and then no others are allowed"
    ),
    "maxProperties": Keyword(Shape.COUNT, _FULL, "object"),
    "dependentRequired": Keyword(Shape.NAME_LISTS, _NOT, "object"),
    "dependentSchemas": Keyword(Shape.SCHEMA_MAP, _NOT, "object"),
    "dependencies": Keyword(Shape.ANYTHING, _NOT, "object", "of older drafts"),
    "items": Keyword(Shape.SCHEMA, _FULL, "array", "without it, none behind `prefixItems`"),
    "prefixItems": Keyword(Shape.SCHEMAS, _FULL, "array"),
    "unevaluatedItems": Keyword(Shape.SCHEMA, _FULL, "array"),
    "minItems": Keyword(Shape.COUNT, _FULL, "array"),
    "maxItems": Keyword(Shape.COUNT, _FULL, "array"),
    "uniqueItems": Keyword(Shape.FLAG, _PARTLY, "array", "only where at most one item is allowed"),
    "contains": Keyword(Shape.SCHEMA, _NOT, "array"),
    "minContains": Keyword(Shape.COUNT, _NOT, "array", "nothing without `contains`"),
    "maxContains": Keyword(Shape.COUNT, _NOT, "array", "nothing without `contains`"),
    "minLength": Keyword(
        Shape.COUNT,
        _FULL,
        "string",
        "characters, an escape being one of them; with `pattern` see there",
    ),
    "maxLength": Keyword(Shape.COUNT, _FULL, "string", "as `minLength`"),
    "pattern": Keyword(
        Shape.TEXT,
        _PARTLY,
        "string",
        "one, in the dialect below; with lengths only if one repeated set of characters takes up the difference",
    ),
    "format": Keyword(
        Shape.TEXT, _PARTLY, "string", "those listed below, not beside `pattern`; with lengths as `pattern`"
    ),
    "contentEncoding": Keyword(Shape.TEXT, _ANNOTATION, "string"),
    "contentMediaType": Keyword(Shape.TEXT, _ANNOTATION, "string"),
    "contentSchema": Keyword(Shape.SCHEMA, _ANNOTATION, "string"),
    "minimum": Keyword(
        Shape.NUMBER, _PARTLY, "number", "numbers then have no exponent and at most 6 decimals; bounds below 2^53"
    ),
    "maximum": Keyword(Shape.NUMBER, _PARTLY, "number", "as `minimum`; whole numbers have bounds of 64 bits"),
    "exclusiveMinimum": Keyword(Shape.NUMBER, _PARTLY, "number", "as `minimum`"),
    "exclusiveMaximum": Keyword(Shape.NUMBER, _PARTLY, "number", "as `minimum`"),
    "multipleOf": Keyword(
        Shape.POSITIVE, _PARTLY, "number", "whole, up to 1024; with bounds only if both are, at most 10,000 apart"
    ),
    "allOf": Keyword(Shape.SCHEMAS, _FULL),
    "anyOf": Keyword(Shape.SCHEMAS, _FULL),
    "oneOf": Keyword(
        Shape.SCHEMAS, _PARTLY, None, "only if its branches can be seen to exclude each other; else as `anyOf`"
    ),
    "not": Keyword(Shape.SCHEMA, _NOT),
    "if": Keyword(Shape.SCHEMA, _NOT),
    "then": Keyword(Shape.SCHEMA, _NOT, None, "nothing without `if`"),
    "else": Keyword(Shape.SCHEMA, _NOT, None, "nothing without `if`"),
    "$ref": Keyword(Shape.TEXT, _FULL, None, "within the document"),
    "$dynamicRef": Keyword(Shape.TEXT, _NOT),
    "$recursiveRef": Keyword(Shape.TEXT, _NOT),
    "$defs": Keyword(Shape.SCHEMA_MAP, _ANNOTATION),
    "definitions": Keyword(Shape.SCHEMA_MAP, _ANNOTATION),
    "$schema": Keyword(Shape.TEXT, _ANNOTATION),
    "$id": Keyword(Shape.TEXT, _ANNOTATION, None, "only at the top, if there are references"),
    "$anchor": Keyword(Shape.TEXT, _ANNOTATION),
    "$dynamicAnchor": Keyword(Shape.TEXT, _ANNOTATION),
    "$comment": Keyword(Shape.TEXT, _ANNOTATION),
    "title": Keyword(Shape.TEXT, _ANNOTATION),
    "description": Keyword(Shape.TEXT, _ANNOTATION),
    "default": Keyword(Shape.ANYTHING, _ANNOTATION),
    "examples": Keyword(Shape.VALUES, _ANNOTATION),
    "deprecated": Keyword(Shape.FLAG, _ANNOTATION),
    "readOnly": Keyword(Shape.FLAG, _ANNOTATION),
    "writeOnly": Keyword(Shape.FLAG, _ANNOTATION),
}

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
