"""Quotes, backslashes and control characters in strings with a length, a pattern or a format: written, and valid."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from gateway.structured.json_schema import schema_grammar
from gateway.structured.regex.escapes import MAX_ESCAPED_REPEAT, MAX_ESCAPED_SINGLE
from tests.gateway.structured.walking import Bench

#: Characters that ECMAScript, Python and this server put into the same sets.
ALPHABET = 'ab1 ,<>/"\\\n\t\b\x01\x1fé日😀'
#: In ECMAScript and here `$` is the end of the text; in Python `\Z` is.
PATTERNS = [
    r"^.*$",
    r"^.+$",
    r"^.?$",
    r"^.{3}$",
    r"^a.b$",
    r"^[^<>]{0,5}$",
    r"^[\s\S]{1,32}$",
    r'^"[^"]*"$',
    r"^(\\.|[^\\])*$",
    r"^\S+( \S+)*$",
    r"^(a|b.)+$",
    r"^[\x00-\x1f]+$",
    r"^[^a-z]*,$",
    r"^([^/]*/){1,3}$",
    r'"',
    r"\\",
    r"\n",
    r"a\tb|[\x01\x02]",
]
LENGTHS = [(0, 3), (2, 40), (1, None), (5, 5), (0, 200), (30, None)]


def strict(bench: Bench, schema: dict[str, Any]) -> Any:
    return bench.compile(schema_grammar(schema, field="schema", strict=True))


@pytest.fixture(scope="module")
def grammars(bench: Bench) -> dict[str, Any]:
    return {pattern: strict(bench, {"type": "string", "pattern": pattern}) for pattern in PATTERNS}


@settings(max_examples=400)
@given(st.sampled_from(PATTERNS), st.data())
def test_strings_that_match_a_pattern_are_taken(
    bench: Bench, grammars: dict[str, Any], pattern: str, data: st.DataObject
) -> None:
    expression = re.compile(pattern.replace("$", r"\Z"))
    text = data.draw(st.from_regex(expression, alphabet=ALPHABET))
    assert bench.accepts(grammars[pattern], json.dumps(text, ensure_ascii=False))


@settings(max_examples=200)
@given(st.sampled_from(PATTERNS), st.text(ALPHABET, max_size=6))
def test_no_others_are(bench: Bench, grammars: dict[str, Any], pattern: str, text: str) -> None:
    if not re.search(pattern.replace("$", r"\Z"), text):
        assert not bench.accepts(grammars[pattern], json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    "schema",
    [
        # A walk hardly ever meets what others look for.
        *({"pattern": pattern} for pattern in PATTERNS if pattern.startswith("^")),
        *({"minLength": low} | ({} if high is None else {"maxLength": high}) for low, high in LENGTHS),
        {"pattern": "^[^a]*$", "minLength": 2, "maxLength": 9},
        {"format": "json-pointer"},
        {"format": "email"},
        {"format": "date-time"},
    ],
    ids=str,
)
def test_what_is_written_is_valid(bench: Bench, schema: dict[str, Any]) -> None:
    schema = {"type": "array", "items": {"type": "string", **schema}, "minItems": 1, "maxItems": 3}
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    grammar = strict(bench, schema)
    ended = [text for seed in range(12) if (text := bench.walk(grammar, random.Random(seed), patience=60)) is not None]
    assert ended
    for text in ended:
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("pattern", "text", "taken"),
    [
        (f"^.{{0,{MAX_ESCAPED_REPEAT}}}$", '"' * MAX_ESCAPED_REPEAT, True),
        (f"^.{{0,{MAX_ESCAPED_REPEAT + 1}}}$", 'a"', False),
        (f"^.{{0,{MAX_ESCAPED_REPEAT + 1}}}$", "a" * (MAX_ESCAPED_REPEAT + 1), True),
        (f"^([^,],){{0,{MAX_ESCAPED_REPEAT + 1}}}$", '",', False),
        (f"^.{{{MAX_ESCAPED_SINGLE}}}$", '"' * MAX_ESCAPED_SINGLE, True),
        (f"^.{{{MAX_ESCAPED_SINGLE + 1}}}$", '"' * (MAX_ESCAPED_SINGLE + 1), False),
        (f'^"{{{MAX_ESCAPED_REPEAT + 1}}}$', '"' * (MAX_ESCAPED_REPEAT + 1), True),
        (r"^(a\n{0,10000})?$", "a" + "\n" * 2000, True),
        (r"\S", '"a"', True),
        (r"\S", '""', False),
        (r"^\S.*\S$", '""', True),
        (r"^a*\S+b*$", 'ac"', True),
        (r"^a*\S+b*$", '"', False),
    ],
)
def test_where_they_would_be_slow_there_are_none(bench: Bench, pattern: str, text: str, taken: bool) -> None:
    """All these texts are valid; what is not taken is said in the documents."""
    assert re.search(pattern, text)
    assert bench.accepts(strict(bench, {"type": "string", "pattern": pattern}), json.dumps(text)) == taken


@pytest.mark.parametrize("name", ['a"', "a\n"])
def test_declared_names_and_listed_values_are_matched_whatever_is_in_them(bench: Bench, name: str) -> None:
    schema = {"type": "object", "properties": {name: True}, "patternProperties": {r'["\n]$': {"type": "null"}}}
    assert bench.accepts(strict(bench, schema), json.dumps({name: None}))
    listed = {"enum": [name, "b"], "pattern": "^a", "maxLength": 2}
    grammar = strict(bench, listed)
    assert bench.accepts(grammar, json.dumps(name)) and not bench.accepts(grammar, '"b"')


def test_names_have_no_escapes(bench: Bench) -> None:
    """Else they could repeat a declared one, or each other."""
    grammar = strict(bench, {"type": "object", "patternProperties": {'^[a"]': {"type": "null"}}})
    assert bench.accepts(grammar, '{"ab": null}') and not bench.accepts(grammar, '{"\\"b": null}')


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (r"^(a|[^\s\S])$", ["a"], ["", "b"]),
        (r"^a[^\s\S]*$", ["a"], ["", "aa"]),
        (r"^a([^\d\D]|b)+$", ["ab", "abb"], ["a"]),
    ],
)
def test_nothing_is_in_a_set_of_nothing(bench: Bench, pattern: str, taken: list[str], refused: list[str]) -> None:
    grammar = strict(bench, {"type": "string", "pattern": pattern})
    assert all(bench.accepts(grammar, json.dumps(text)) for text in taken)
    assert not any(bench.accepts(grammar, json.dumps(text)) for text in refused)


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"^a[^\w\W]b$", r"^[^\s\S]+$"])
def test_a_pattern_that_nothing_matches_allows_no_string(bench: Bench, pattern: str) -> None:
    grammar = strict(bench, {"type": ["string", "null"], "pattern": pattern})
    assert bench.accepts(grammar, "null")
    assert not any(bench.accepts(grammar, json.dumps(text)) for text in ("", "a", "ab"))
    with pytest.raises(InvalidRequest, match="no value is valid"):
        schema_grammar({"type": "string", "pattern": pattern}, field="schema", strict=True)
