"""Strings of bounded length in JSON: what they take, that it is counted, and that masks are known beforehand."""

import json
from typing import Any

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.grammar.job_compiler import compile_source
from common.sampling import GrammarKind

#: Every byte, tokens that go beyond what is looked ahead, and some that end in the midst of things.
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(b"-" * length for length in (2, 3, 5, 7, 12, 19, 20, 21, 22, 40, 64)),
    *(text.encode() for text in ("ab", 'a"', '."', "é日", 'é"', "\\n", "\\\\", '\\"', "x\\", "n\\n", "\\u00", "00e9a")),
    b"a" * 30 + b'"',
    *(text.encode() for text in ("\\ud83d\\ud", "e00", "\\ude00-", '"', '","', "日" * 21, '"}')),
]
END = len(TOKENS)
#: Fewest and most characters.
Lengths = tuple[int, int | None]
LENGTHS: list[Lengths] = [
    (0, 0), (0, 1), (1, 1), (0, 3), (2, 5), (4, 4), (0, 19), (0, 20), (0, 21), (3, 23), (20, 30), (25, 25), (0, 90),
    (30, 64), (85, 99), (0, 1000), (990, 1000), (1, None), (2, None), (21, None), (300, None),
]  # fmt: skip
CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\/\b\f\n\r\t\0\x1f\x7fé日😀')


def bounds(low: int, high: int | None) -> dict[str, Any]:
    return {"type": "string", "minLength": low} | ({} if high is None else {"maxLength": high})


def compiled(schema: dict[str, Any], kind: GrammarKind = GrammarKind.JSON_SCHEMA) -> xgrammar.CompiledGrammar:
    vocabulary = xgrammar.TokenizerInfo([*TOKENS, b""], stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    source: dict[str, Any] = schema
    if kind is GrammarKind.STRUCTURAL_TAG:
        source = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    return compile_source(compiler, kind, json.dumps(source))


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and bool(matcher.accept_token(END))


def allowed(matcher: xgrammar.GrammarMatcher) -> list[int]:
    words = xgrammar.allocate_token_bitmask(1, END + 1)
    matcher.fill_next_token_bitmask(words)
    bits = np.unpackbits(words.numpy().view(np.uint8)[0], bitorder="little")[: END + 1]
    return [int(token) for token in np.flatnonzero(bits)]


@pytest.fixture(scope="module")
def grammars() -> dict[Lengths, xgrammar.CompiledGrammar]:
    return {lengths: compiled(bounds(*lengths)) for lengths in LENGTHS}


@settings(max_examples=300)
@given(st.sampled_from(LENGTHS), st.data())
def test_any_string_of_the_length_is_taken_and_no_other(
    grammars: dict[Lengths, xgrammar.CompiledGrammar],
    lengths: Lengths,
    data: st.DataObject,
) -> None:
    low, high = lengths
    last = low + 40 if high is None else high
    near = st.sampled_from(sorted({n for edge in (low, last) for n in range(max(edge - 2, 0), edge + 3)}))
    count = data.draw(near | st.integers(low, last))
    some = data.draw(st.lists(CHARACTERS, min_size=1, max_size=8))
    text = "".join(some[place % len(some)] for place in range(count))
    fits = low <= count and (high is None or count <= high)
    for ensure_ascii in (False, True):
        assert accepts(grammars[lengths], json.dumps(text, ensure_ascii=ensure_ascii)) == fits


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG])
@pytest.mark.parametrize("lengths", [(0, 2), (0, 30), (1, None), (5, None)])
@pytest.mark.parametrize(
    ("inside", "taken"),
    [
        ("\\/", True),
        ("\\u00E9\\u0000", True),
        ("\\ud83D\\uDe00", True),
        ("\\ud83d", False),
        ("\\ude00", False),
        ("\\ud83d\\u0041", False),
        ("\\x41", False),
        ("\\u12", False),
        ("\\'", False),
        ("\n", False),
        ("\0", False),
        ("\\", False),
        ('"', False),
    ],
)
def test_escapes_are_those_of_json(kind: GrammarKind, lengths: Lengths, inside: str, taken: bool) -> None:
    """Wherever in the string."""
    grammar = compiled({"type": "array", "items": bounds(*lengths)}, kind)
    for before in ("", "abcde"[: lengths[0]], "x" * 8 if lengths[1] != 2 else ""):
        pad = "" if lengths[0] <= len(before) + 1 else "y" * lengths[0]
        assert accepts(grammar, f'["{before}{inside}{pad}"]') == taken


@pytest.mark.parametrize("lengths", [(0, 3), (0, 45), (26, 46), (30, 30), (2, 300), (1, None), (22, None)])
def test_masks_say_what_can_be_accepted_all_the_way(lengths: Lengths) -> None:
    """Also near the end, where tokens are longer than what is left."""
    grammar = compiled({"type": "array", "items": bounds(*lengths), "maxItems": 2})
    for seed in range(3):
        random = np.random.default_rng(seed)
        matcher = xgrammar.GrammarMatcher(grammar)
        for _ in range(150):
            can = [token for token in range(END + 1) if matcher.fork().accept_token(token)]
            assert allowed(matcher) == can
            if can == [END]:
                break
            going_on = [token for token in can if token != END and b'"' not in TOKENS[token]]
            assert matcher.accept_token(int(random.choice(going_on or can)))


def tried(grammar: xgrammar.CompiledGrammar) -> int:
    """The most tokens that any one place leaves to be tried, of those that a walk through long strings meets."""
    value = json.loads(grammar.serialize_json())
    names = [rule[0] for rule in value["grammar"]["rules"]]
    places = [(names[state[0]], mask) for state, mask in value["adaptive_token_mask_cache"]]
    return max(len(mask["uncertain_indices"]) for name, mask in places if name.startswith("json_character"))


@pytest.mark.parametrize("lengths", [(0, 4000), (1000, 4000), (2500, None)])
def test_nearly_all_tokens_are_decided_beforehand(lengths: Lengths) -> None:
    """What a mask costs is what is tried for it: tokens that end the string within, and the longest."""
    long_or_ending = sum(b'"' in token or len(token.decode("utf-8", "replace")) > 20 for token in TOKENS)
    assert tried(compiled(bounds(*lengths))) <= long_or_ending


def test_all_lengths_share_their_rules() -> None:
    strings = {f"p{count}": bounds(count, 100 + 50 * count) for count in range(10)}
    one, ten = (
        len(compiled({"type": "object", "properties": properties}).serialize_json())
        for properties in ({"p": bounds(0, 550)}, strings)
    )
    assert ten < 3 * one


def test_in_huge_schemas_only_strings_that_are_just_not_empty_take_escapes() -> None:
    """The library's form of a grammar grows with the square of its rules."""
    many = {f"p{count}": bounds(0, 100 + count) for count in range(200)}
    properties = {"first": bounds(0, 9), "second": bounds(1, None), **many}
    grammar = compiled({"type": "object", "properties": properties, "required": ["first", "second"]})
    assert accepts(grammar, '{"first": "a", "second": "\\n"}')
    assert not accepts(grammar, '{"first": "\\n", "second": "a"}')
    assert not accepts(grammar, '{"first": "0123456789", "second": "a"}')


def test_names_of_rules_are_never_those_of_the_grammar() -> None:
    grammar = compiled({"type": "object", "properties": {"json_": bounds(0, 30), "x": {"enum": ["json__"]}}})
    assert accepts(grammar, '{"json_": "\\n", "x": "json__"}')
