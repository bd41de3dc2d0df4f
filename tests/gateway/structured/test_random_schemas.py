"""Schemas made up at random: whatever a strict check lets pass, all that its grammar lets through is valid."""

import json
import random
from typing import Any

import jsonschema
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from gateway.structured.json_schema import schema_grammar
from tests.gateway.structured.walking import Bench

NAMES = st.sampled_from(["a", "ab", "title", "x-1", "é", ""])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.sampled_from(["a", "ab", "b1", 'a"', "\n", "", 0.5, -1.25, 1e20])
)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(NAMES, SCALARS, max_size=2)
PATTERNS = st.sampled_from(
    ["^a", "b$", "1", "^x-", "^[ab]{1,2}$", "^(a|b1)$", "^[^a]+$", "", "^a?b*$", "^.{0,3}$", '"', "^\\S.*[^a]$"]
)
BOUNDS = st.integers(-3, 10) | st.sampled_from([0.5, -0.25, 2.0, 1e-7])
COUNTS = st.integers(0, 3)
TYPES = st.sampled_from(["null", "boolean", "object", "array", "number", "string", "integer"])
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/b"])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    maps = st.dictionaries(NAMES, inner, max_size=3)
    lists = st.lists(inner, min_size=1, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=4),
        "const": VALUES,
        "properties": maps,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "propertyNames": st.fixed_dictionaries({"pattern": PATTERNS}) | st.fixed_dictionaries({"maxLength": COUNTS}),
        "unevaluatedProperties": inner,
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
        "items": inner,
        "prefixItems": lists,
        "unevaluatedItems": inner,
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "minLength": COUNTS,
        "maxLength": COUNTS,
        "pattern": PATTERNS,
        "minimum": BOUNDS,
        "maximum": BOUNDS,
        "exclusiveMinimum": BOUNDS,
        "exclusiveMaximum": BOUNDS,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 1.5]),
        "allOf": lists,
        "anyOf": lists,
        "oneOf": lists,
        "$ref": REFERENCES,
    }
    return st.lists(st.sampled_from(list(keywords)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )


SCHEMAS = st.recursive(st.booleans() | schemas(st.booleans()), schemas, max_leaves=8)
DOCUMENTS = st.builds(
    lambda root, a, b: root if isinstance(root, bool) else {**root, "$defs": {"a": a, "b": b}},
    SCHEMAS,
    SCHEMAS,
    SCHEMAS,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(DOCUMENTS, st.integers(0, 1000))
def test_output_is_valid(bench: Bench, schema: Any, seed: int) -> None:
    try:
        spec = schema_grammar(schema, field="schema", strict=True)
    except InvalidRequest:
        assume(False)
    validator = jsonschema.Draft202012Validator(schema)
    grammar = bench.compile(spec)
    for draw in range(6):
        text = bench.walk(grammar, random.Random(seed + draw), patience=25)
        if text is not None:
            validator.validate(json.loads(text))
