"""What of JSON schemas is refused, with which words, and how the rest is written."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.sampling import GrammarKind
from gateway.structured.json_schema import enforceable_schema, schema_grammar
from gateway.structured.limits import MAX_DEPTH
from gateway.structured.schema.keywords import KEYWORDS, Support
from tests.gateway.structured.walking import Bench

FIELD = "response_format.json_schema.schema"


def complaint(schema: Any, *, strict: bool = True) -> str:
    with pytest.raises(InvalidRequest) as caught:
        schema_grammar(schema, field=FIELD, strict=strict)
    assert caught.value.field == FIELD
    assert caught.value.message.startswith(FIELD)
    return caught.value.message[len(FIELD) :]


def nested(keyword: str, depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {keyword: schema}
    return schema


def chain(keyword: str, length: int) -> Any:
    """References one behind the other; nothing is valid under the last one."""

    def link(index: int) -> Any:
        reference = {"$ref": f"#/$defs/n{index}"}
        return reference if keyword == "$ref" else {keyword: [reference]}

    return {**link(0), "$defs": {f"n{i}": link(i + 1) if i < length else False for i in range(length + 1)}}


def shortly(value: Any) -> str:
    """The id of a parameter; some are too deep for `repr`."""
    return value[:40] if isinstance(value, str) else ",".join(value)[:40] if isinstance(value, dict) else "schema"


NOT_SCHEMAS: list[tuple[Any, str]] = [
    (3, ": must be a schema"),
    ({"type": "strin"}, ": /type: must be a type"),
    ({"type": []}, ": /type: must be a type"),
    ({"type": ["string", "string"]}, ": /type: must be a type"),
    ({"properties": {"a/b": 1}}, ": /properties: must be an object of schemas"),
    ({"properties": {"a/b": {"minLength": -1}}}, ": /properties/a~1b/minLength: must be a whole number"),
    ({"minLength": 1.5}, ": /minLength: must be a whole number"),
    ({"minLength": True}, ": /minLength: must be a whole number"),
    ({"multipleOf": 0}, ": /multipleOf: must be a number above 0"),
    ({"required": "a"}, ": /required: must be a list of different strings"),
    ({"required": ["a", "a"]}, ": /required: must be a list of different strings"),
    ({"anyOf": []}, ": /anyOf: must be a non-empty list of schemas"),
    ({"enum": "a"}, ": /enum: must be a list"),
    ({"items": [{}]}, ": /items: must be a schema"),
    ({"$defs": {"a": {"pattern": 1}}}, ": /$defs/a/pattern: must be a string"),
    ({"$schema": "http://example.com/mine"}, ": /$schema: is not a draft that is known"),
    ({"$ref": "http://example.com/a.json"}, ": /$ref: only references within the schema"),
    ({"$ref": "other.json#/a"}, ": /$ref: only references within the schema"),
    ({"$ref": "#/$defs/a"}, ": /$ref: leads nowhere"),
    ({"$ref": "#/enum/1", "enum": [1]}, ": /$ref: leads nowhere"),
    ({"$ref": "#/enum/0", "enum": [1]}, ": /enum/0: must be a schema"),
    ({"$ref": "#a"}, ": /$ref: leads to an anchor that is not there"),
    ({"$ref": "#"}, ": refers to itself, with nothing between"),
    ({"allOf": [{"$ref": "#"}]}, ": refers to itself, with nothing between"),
    ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, ": refers to itself, with nothing between"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "refers to itself"),
    ({"$defs": {"a": {"$id": "b"}}, "$ref": "#/$defs/a"}, ": /$defs/a/$id: $id below the top is not supported"),
    (False, ": no value is valid"),
    ({"enum": []}, ": no value is valid"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, ": no value is valid"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, ": no value is valid"),
    ({"type": "integer", "minimum": 0.1, "maximum": 0.9}, ": no value is valid"),
    ({"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}, ": no value is valid"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, ": no value is valid"),
    ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, ": /minimum: no number of at most 6 decimals"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, ": no value is valid"),
    ({"type": "array", "items": False, "minItems": 1}, ": no value is valid"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, ": no value is valid"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, ": no value is valid"),
    ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, ": no value is valid"),
    ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, ": no value is valid"),
    ({"type": "string", "const": 1}, ": no value is valid"),
    (nested("items", MAX_DEPTH + 1), "is nested more than"),
    (nested("not", 20_000), "is nested more than"),
    ({"default": "x" * 200_000}, "is larger than"),
    ({"properties": {f"p{i}": {} for i in range(5001)}}, "there are more than 5000 properties"),
    ({"enum": list(range(1001))}, ": /enum: there are more than 1000 enum values"),
    ({"const": "\ud800"}, "half of a surrogate pair"),
    ({"properties": {"\udc00": {}}}, "half of a surrogate pair"),
    ({"minimum": float("inf")}, ": /minimum: is beyond what a number can be"),
    ({"minimum": 10**2000}, ": /minimum: is beyond what a number can be"),
    ({"allOf": [{"anyOf": [{"minimum": i} for i in range(10)]}] * 4}, "alternatives"),
    (chain("$ref", 3000), ": no value is valid"),
    (chain("allOf", 2000), "is more than 100 references deep"),
    ({"enum": list(range(900)), "anyOf": [{"minimum": i} for i in range(250)]}, ": is too complex"),
    (
        {
            "properties": {f"property_{i}": {} for i in range(2000)},
            "patternProperties": {f"[a-z]{{1,{i}}}_": {} for i in range(900, 930)},
        },
        ": is too complex",
    ),
    ({"pattern": "(a{1000}){1000}"}, "has more than 20000 characters, repetitions counted"),
]


@pytest.mark.parametrize(("schema", "words"), NOT_SCHEMAS, ids=shortly)
@pytest.mark.parametrize("strict", [True, False])
def test_is_refused_in_any_mode(schema: Any, words: str, strict: bool) -> None:
    assert words in complaint(schema, strict=strict)


UNENFORCED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, ": /not: `not` cannot be enforced"),
    ({"if": {}, "then": {}}, ": /if: `if` cannot be enforced"),
    ({"type": "array", "uniqueItems": True}, ": /uniqueItems: `uniqueItems` cannot"),
    ({"type": "array", "contains": {}}, ": /contains: `contains` cannot"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ": /dependentRequired: "),
    ({"type": "object", "dependentSchemas": {"a": {}}}, ": /dependentSchemas: "),
    ({"type": "object", "dependencies": {"a": ["b"]}}, ": /dependencies: "),
    ({"type": "object", "minProperties": 2}, ": /minProperties: "),
    ({"type": "number", "multipleOf": 0.01}, ": /multipleOf: "),
    ({"type": "integer", "multipleOf": 2000}, ": /multipleOf: "),
    ({"type": "integer", "multipleOf": 2, "minimum": 0}, ": /multipleOf: "),
    ({"type": "integer", "minimum": 10**19}, ": /minimum: a bound beyond 64 bits"),
    ({"type": "number", "minimum": 1e16}, ": /minimum: a bound beyond 2^53"),
    ({"enum": [10**19, 1]}, ": /enum: a whole number beyond 64 bits"),
    ({"type": "string", "format": "idn-email"}, ": /format: `format` 'idn-email'"),
    ({"type": "string", "format": "hostname"}, ": /format: `format` 'hostname'"),
    ({"type": "string", "pattern": "(?=a)b"}, ": /pattern: look-ahead is not supported at character 2: this pattern"),
    ({"oneOf": [{"type": "string", "pattern": '"'}, {"type": "string"}]}, ": /oneOf: "),
    ({"type": "string", "pattern": "a", "format": "date"}, ": /format: more than one pattern or format"),
    ({"type": "string", "pattern": "^a*b*$", "maxLength": 3}, ": /maxLength: a length of 0 to 3 beside this form"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ": /allOf/1/pattern: more than one"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ": /oneOf: `oneOf` whose branches 0 and 1 may both"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ": /oneOf: "),
    ({"oneOf": [{"minLength": 1}, {"type": "integer"}]}, ": /oneOf: "),
    ({"oneOf": [{"type": "string", "pattern": "^a"}, {"const": 'a"'}]}, ": /oneOf: "),
    ({"oneOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object"}]}, ": /oneOf: "),
    ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, ": /propertyNames/not: "),
    ({"properties": {"a": {"items": {"not": {}}}}}, ": /properties/a/items/not: "),
    ({"enum": [{"a": 1}], "type": "object", "required": ["b"]}, ": /required: `required` beside listed objects"),
    ({"$dynamicRef": "#a"}, ": /$dynamicRef: "),
]


@pytest.mark.parametrize(("schema", "words"), UNENFORCED, ids=shortly)
def test_what_cannot_be_enforced_is_refused_only_if_strict(bench: Bench, schema: Any, words: str) -> None:
    assert words in complaint(schema)
    bench.compile(schema_grammar(schema, field=FIELD, strict=False))


EXCLUSIVE: list[list[Any]] = [
    [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
    [{"const": "a"}, {"enum": ["b", 1]}, {"type": "boolean"}],
    [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}],
    [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
    [{"type": "string", "pattern": "^x-"}, {"type": "string", "pattern": "^y-"}],
    [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}],
    [{"type": "array", "prefixItems": [{"const": kind}], "minItems": 1} for kind in ("a", "b")],
    [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")],
    [
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        {"type": "object", "properties": {"b": {}}, "required": ["b"]},
    ],
]


@pytest.mark.parametrize("branches", EXCLUSIVE, ids=json.dumps)
def test_branches_that_exclude_each_other_are_enforced(bench: Bench, branches: list[Any]) -> None:
    bench.compile(schema_grammar({"oneOf": branches}, field=FIELD, strict=True))


PATTERNS = [
    ("^https?://", ["https://", "http://x"], ["x http://", "https:"]),
    ("\\.(png|jpe?g)$", ["a.png", ".jpg"], ["png", "a.png.gz"]),
    ("[0-9]", ["a1b", "1"], ["", "ab"]),
    ("^a|b$", ["ab", "ax", "xb"], ["xa", "bx"]),
    ("^(a|b$)", ["ax", "b"], ["bx", "xa"]),
    ("^$", [""], ["a"]),
    ("", ["", "anything"], []),
    ("^(-[a]+)?$", ["", "-a", "-aa"], ["a", "-"]),
    ("^[\\^a]$", ["^", "a"], ["b", "-"]),
    ("^[\\^-z]+$", ["^", "a_z"], ["A", "-", ""]),
    ("^[\\w.+-]+$", ["a.b+c-d_1"], ["", "é", " "]),
    ("^\\S+$", ["é", "a-b"], [" ", "", "\u00a0"]),
    ("^(?:ab){2,3}?$", ["abab", "ababab"], ["ab", "abababab"]),
    ("^(?P<y>\\d{4})-(?<m>\\d\\d)$", ["2024-01"], ["2024-1"]),
    ("^\\u00e9\\x41\\u{1F600}\\ud83d\\ude00$", ["éA😀😀"], ["éA😀"]),
    ("^[^a-z]{2}$", ["AB", "é9", "[]"], ["aB", "A"]),
    ("^.$", ["a", "é", "😀"], ["", "ab"]),
    ("^a{0}b$", ["b"], ["ab"]),
    ("^{a}]$", ["{a}]"], ["a"]),
    ("^(|a)b$", ["b", "ab"], ["a"]),
]


@pytest.mark.parametrize(("pattern", "fits", "fails"), PATTERNS)
def test_patterns_are_searched_for_as_the_specification_says(
    bench: Bench, pattern: str, fits: list[str], fails: list[str]
) -> None:
    grammar = bench.compile(schema_grammar({"type": "string", "pattern": pattern}, field=FIELD, strict=True))
    for text in (*fits, *fails):
        assert bench.accepts(grammar, json.dumps(text, ensure_ascii=False)) == (text in fits), text


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({}, {}),
        (True, {}),
        ({"title": "T", "description": "D", "default": 1, "examples": [1], "x-mine": {"not": 1}}, {}),
        ({"type": "string", "minLength": 1}, {"type": "string", "minLength": 1}),
        ({"minimum": 0}, {"type": "number", "minimum": 0}),
        ({"type": "integer", "minimum": 0.5}, {"type": "integer", "minimum": 1}),
        ({"type": "integer", "exclusiveMaximum": 3}, {"type": "integer", "maximum": 2}),
        ({"type": "number", "multipleOf": 2}, {"type": "integer", "multipleOf": 2}),
        ({"type": ["string", "null"], "const": None}, {"const": None}),
        ({"enum": [1, 1.0, True, 2], "type": "integer"}, {"enum": [1, 2]}),
        ({"type": ["number", "integer"]}, {"type": "number"}),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"type": "integer"}),
        ({"anyOf": [{"type": "null"}, False]}, {"type": "null"}),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "items": {}, "maxItems": 1}),
        ({"type": "array", "minContains": 2}, {"type": "array", "items": {}}),
    ],
    ids=json.dumps,
)
def test_is_written_in_simpler_terms(schema: Any, written: Any) -> None:
    assert enforceable_schema(schema, field=FIELD, strict=True) == written


def test_properties_keep_the_clients_order() -> None:
    names = ["zeta", "alpha", "mid", "1"]
    spec = schema_grammar({"type": "object", "properties": {name: {} for name in names}}, field=FIELD, strict=True)
    assert spec.kind is GrammarKind.JSON_SCHEMA
    assert list(json.loads(spec.source)["properties"]) == names


def test_further_names_cannot_repeat_a_declared_one_by_escapes(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    grammar = bench.compile(schema_grammar(schema, field=FIELD, strict=True))
    assert bench.accepts(grammar, '{"a": 1, "b": "x", "aa": "x", "": "x"}')
    assert not bench.accepts(grammar, '{"a": 1, "\\u0061": "x"}')
    assert not bench.accepts(grammar, '{"a": 1, "a": "x"}')


@pytest.mark.parametrize("name", ["name", "n" * 300])
def test_names_like_many_declared_ones_are_left_out(bench: Bench, name: str) -> None:
    schema = {"type": "object", "properties": {name + str(i): {} for i in range(50)}, "additionalProperties": True}
    grammar = bench.compile(schema_grammar(schema, field=FIELD, strict=True))
    assert bench.accepts(grammar, f'{{"{name}0": 1, "other": 2}}')
    assert not bench.accepts(grammar, f'{{"{name}10x": 1}}')


def test_a_long_chain_of_references_needs_no_deep_recursion() -> None:
    count = 2000
    links = {f"n{i}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/n{i + 1}"}}} for i in range(count)}
    schema = {"$ref": "#/$defs/n0", "$defs": {**links, f"n{count}": {"type": "null"}}}
    assert schema_grammar(schema, field=FIELD, strict=True).source.count("$ref") == count - 1


def test_shapes_are_those_of_the_keywords_table_and_no_wider_than_the_metaschema() -> None:
    """Keywords that are annotations may have any subschema without being refused."""
    for keyword, entry in KEYWORDS.items():
        if entry.support is Support.ANNOTATION and keyword not in ("$schema", "$id", "$anchor", "$dynamicAnchor"):
            sample = {"a string": "x", "any value": 1, "true or false": True, "a list": [1]}.get(entry.shape.value, {})
            assert enforceable_schema({keyword: sample}, field=FIELD, strict=True) == {}


_NAMES = ["a", "type", "items"]
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(["string", "a", "#", "", "^a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=2),
    max_leaves=6,
)
_SCHEMAS = st.dictionaries(
    st.sampled_from([name for name in KEYWORDS if name[0] != "$" and name not in ("dependencies", "definitions")]),
    _VALUES,
    max_size=3,
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(_SCHEMAS)
def test_shapes_agree_with_the_metaschema(schema: dict[str, Any]) -> None:
    """What the metaschema refuses is refused; what it takes may still be refused, but not for its shape."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        is_schema = True
    except jsonschema.SchemaError:
        is_schema = False
    try:
        enforceable_schema(schema, field=FIELD, strict=False)
        words = ""
    except InvalidRequest as error:
        words = error.message
    assert is_schema == (": must be " not in words), words


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(_SCHEMAS, st.booleans())
def test_any_value_ends_in_a_grammar_or_in_words(bench: Bench, schema: dict[str, Any], strict: bool) -> None:
    try:
        spec = schema_grammar(schema, field=FIELD, strict=strict)
    except InvalidRequest:
        return
    bench.compile(spec)
