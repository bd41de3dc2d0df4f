"""Regular expressions, choices and Backus-Naur grammars: what is refused, and that the rest means what was written."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from gateway.structured.output import OutputKind, StructuredOutput, grammar_of
from gateway.structured.regex.forms import excluding, full_match, lengths, only
from gateway.structured.regex.match import Automaton
from gateway.structured.regex.parse import parse_regex
from gateway.structured.regex.tree import ANY_RANGES, NOTHING
from tests.gateway.structured.walking import Bench


def spec_of(kind: OutputKind, constraint: object):
    return grammar_of(StructuredOutput(kind, constraint), field="f")


REGEXES = [
    ("a|b", ["a", "b"], ["", "ab"]),
    ("^yes$|^no$", ["yes", "no"], ["yesno", "y"]),
    ("^(yes|no)$", ["yes", "no"], ["yes$"]),
    ("\\d{3}-\\d{4}", ["555-1234"], ["5555-123", "555-12345"]),
    ('"[^"]*"', ['""', '"a b"', '"\n"'], ['"']),
    ("(-[a]+)?", ["", "-aa"], ["a"]),
    ("[\\^a]", ["^", "a"], ["b"]),
    ("\\x2e0", [".0"], [".", "\u02e0"]),
    ("[\\x00-\\x1f0-9]", ["\t", "5"], ["a"]),
    ("\\n\\t\\\\", ["\n\t\\"], ["nt"]),
    (".*", ["", "é b"], ["a\nb"]),
    ("[\\s\\S]*", ["", "a\nb"], []),
    ("\\S+", ["é"], [" ", "\u3000"]),
    ("\\W", ["é", "-"], ["a", "_"]),
    ("(?P<year>\\d{4})(?:-x)*?", ["2024", "2024-x-x"], ["2024-"]),
    ("\\A[a-c]+\\Z", ["abc"], ["d"]),
    ("x{2}y{0,1}z{1,}", ["xxz", "xxyzz"], ["xz", "xxyy"]),
    ("(|a)(b|)", ["", "a", "b", "ab"], ["ba"]),
    ("[\\]a]", ["]", "a"], ["\\"]),
    ("[^\\s]", ["é"], [" ", "\u00a0"]),
    ("[\\\\s\\S]", ["s", "\\", "é"], ["\u00a0"]),
    ("[\\S\\s]", ["a", " ", "\u00a0"], ["", "ab"]),
    ("a{b}", ["a{b}"], ["ab"]),
    ("é\\u00e9\\U0001f600", ["éé😀"], ["é"]),
]


@pytest.mark.parametrize(("pattern", "fits", "fails"), REGEXES)
def test_regex_is_matched_whole(bench: Bench, pattern: str, fits: list[str], fails: list[str]) -> None:
    grammar = bench.compile(spec_of(OutputKind.REGEX, pattern))
    for text in (*fits, *fails):
        assert bench.accepts(grammar, text) == (text in fits), text


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=a)", "look-ahead is not supported at character 2"),
        ("(?!a)", "negative look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?<!a)b", "negative look-behind"),
        ("(a)\\1", "a backreference is not supported"),
        ("(?P<a>b)(?P=a)", "a backreference"),
        ("\\k<a>", "a backreference"),
        ("\\bword", "a word boundary"),
        ("\\Bword", "a word boundary"),
        ("(?i)a", "a flag group"),
        ("(?i:a)", "a flag group"),
        ("(?>a)", "an atomic group"),
        ("(?(1)a|b)", "a conditional group"),
        ("(?#comment)a", "a comment"),
        ("a*+", "a possessive quantifier"),
        ("a**", "a quantifier on a quantifier"),
        ("a{2}{3}", "a quantifier on a quantifier"),
        ("^*", "a quantifier on an anchor"),
        ("*a", "a quantifier with nothing before it"),
        ("a|+b", "a quantifier with nothing before it"),
        ("\\p{L}", "a Unicode property"),
        ("[[:alpha:]]", "a POSIX class"),
        ("[]a]", "a ] at the beginning of a set"),
        ("[a", "a [ that is not closed"),
        ("[z-a]", "a range in the wrong order"),
        ("[\\d-z]", "a range between sets"),
        ("a{,3}", "{,n}"),
        ("a{3,2}", "in the wrong order"),
        ("a{1,100000}", "a repetition of more than"),
        ("a{1,999999999999999999999}", "a repetition of more than"),
        ("(a", "a ( that is not closed"),
        ("a)", "a ) without a ("),
        ("a\\", "the escape \\ is not supported"),
        ("\\q", "the escape \\q is not supported"),
        ("\\ud800", "half of a surrogate pair"),
        ("\\u{110000}", "a code point beyond Unicode"),
        ("a^b", "an anchor (^ or $) in the middle"),
        ("(a$)*", "an anchor (^ or $) in the middle"),
        ("((a{100}){100}){100}", "has more than 20000 characters"),
        ("(" * 100_000, "groups nested more than"),
        ("a\0", "NUL"),
        ("a" * 200_000, "longer than"),
        ("[^\\s\\S]", "no text can match it"),
        ("\ud800", "half of a surrogate pair"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_regex_that_cannot_be_followed_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        spec_of(OutputKind.REGEX, pattern)
    assert caught.value.field == "f"


_PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "é", ".", "[ab]", "[^a]", "\\d", "\\w", "-", "\\."]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])).map("({0[0]}){0[1]}".format),
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(_PATTERNS, st.lists(st.text("ab-.é1\n", max_size=5), min_size=5, max_size=10), st.integers(0, 99))
def test_regex_means_what_it_means_elsewhere(bench: Bench, pattern: str, texts: list[str], seed: int) -> None:
    """Compared with Python's `re`, in the automaton of the gateway and in the compiled grammar."""
    reference = re.compile(pattern, re.ASCII)
    automaton = Automaton(only(full_match(parse_regex(pattern)), ANY_RANGES))
    grammar = bench.compile(spec_of(OutputKind.REGEX, pattern))
    walked = bench.walk(grammar, random.Random(seed), patience=10)
    for text in [*texts, *([] if walked is None else [walked])]:
        if "\r" in text or "\u2028" in text or "\u2029" in text:
            continue
        expected = reference.fullmatch(text) is not None
        assert automaton.matches(text) == expected
        assert bench.accepts(grammar, text) == expected
    assert walked is None or automaton.matches(walked)


@given(st.sets(st.text('ab"é', max_size=4), min_size=1, max_size=5), st.text('abé"', max_size=5), st.integers(0, 20))
def test_names_that_are_left_are_all_but_the_given_ones(names: set[str], text: str, most_prefixes: int) -> None:
    """With few prefixes fewer are left, but never a given one; with many, all the others."""
    is_left = Automaton(excluding(names, most_prefixes)).matches(text)
    expected = text not in names and '"' not in text
    assert is_left == expected if most_prefixes == 20 else is_left <= expected


@settings(max_examples=100)
@given(_PATTERNS, st.text("ab-.é1", max_size=6))
def test_lengths_bound_what_matches(pattern: str, text: str) -> None:
    tree = only(full_match(parse_regex(pattern)), ANY_RANGES)
    low, high = lengths(tree)
    if tree != NOTHING and Automaton(tree).matches(text):
        assert low <= len(text)
        assert high is None or len(text) <= high


@pytest.mark.parametrize(
    "choices",
    [
        ["a", "ab", "abc"],
        ["positive", "negative"],
        ['q"uo\\te', "new\nline", "é😀", " ", "\x7f", "\u2028"],
        ["[a]", "a|b", "a*"],
    ],
)
def test_every_choice_can_be_reached_and_nothing_else(bench: Bench, choices: list[str]) -> None:
    grammar = bench.compile(spec_of(OutputKind.CHOICE, tuple(choices)))
    for choice in choices:
        assert bench.accepts(grammar, choice)
        assert not bench.accepts(grammar, choice + "~")
    assert not bench.accepts(grammar, "")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "Lark is not supported"),
        ("start: A\nA: /a/", "Lark is not supported"),
        ('a ::= "b"', "there is no rule `root`"),
        ("root ::= a", "line 1: there is no rule `a`"),
        ('root ::= "a"\nb ::= c | d', "line 2: there is no rule `c`"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule `root` is defined twice"),
        ('root ::= ("a"', "line 1: a ( is not closed"),
        ('root ::= "a")', "line 1: a ) without a ("),
        ('root ::= ("a"\nb ::= "c"', "line 2: a ( is not closed"),
        ('root ::= "a', "is not understood"),
        ("root ::= [a", "is not understood"),
        ("root ::= 'a'", "is not understood"),
        ('root ::= "a"{3,2}', "in the wrong order"),
        ('root ::= "a"{1,100000}', "a repetition of more than"),
        ("root ::= *", "nothing before it to repeat"),
        ('root ::= "a"**', "nothing before it to repeat"),
        ('"a" ::= b', "a rule begins with"),
        ('root ::= ::= "a"', "::= without a name"),
        ('root ::= "\\q"', "the escape \\q is not supported"),
        ('root ::= "\\ud83d\\ude00"', "\\ud83d is no character"),
        ("root ::= [\\uD800-\\uDFFF]", "\\uD800 is no character"),
        ("root ::= [a\\xdfff]", "\\xdfff is no character"),
        ('root ::= "\\U00110000"', "\\U00110000 is no character"),
        ('root ::= Regex("a")', "there is no rule `Regex`"),
        ('root ::= TagDispatch(("a", b))\nb ::= "c"', "is not understood"),
        ("root ::= " + "(" * 100_000, "groups are nested more than"),
        ('root ::= "a\0"', "NUL"),
        ("root ::= " + '"a" ' * 50_000, "longer than"),
        ('root ::= "\ud800"', "half of a surrogate pair"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_grammar_that_is_none_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        spec_of(OutputKind.GRAMMAR, grammar)


@pytest.mark.parametrize(
    ("grammar", "fits", "fails"),
    [
        ('root ::= "a" | b\nb ::= [x-z]{1,2} # comment\n', ["a", "x", "zz"], ["", "xyz"]),
        ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"', ["1+(2+3)"], ["1+", "()"]),
        ('root  ::=\n  "a"\n  | "b"\n', ["a", "b"], ["ab"]),
        ('root ::= "\\x41\\u00e9\\n" [^\\]\\-a]?', ["Aé\n", "Aé\nb"], ["Aé\na", "Aé\n-"]),
        ('root-1 ::= "a"\nroot ::= root-1 root-1', ["aa"], ["a"]),
    ],
)
def test_grammar_is_handed_on(bench: Bench, grammar: str, fits: list[str], fails: list[str]) -> None:
    compiled = bench.compile(spec_of(OutputKind.GRAMMAR, grammar))
    for text in (*fits, *fails):
        assert bench.accepts(compiled, text) == (text in fits), text


@pytest.mark.parametrize("blanks", ["{1,%sx", "{%sx", "{1%sx", "{1,2%sx"])
def test_counts_with_many_blanks_take_no_time(blanks: str) -> None:
    """A pattern that tries every way to share the blanks out would take minutes here."""
    with pytest.raises(InvalidRequest, match="line 1"):
        spec_of(OutputKind.GRAMMAR, 'root ::= "a"' + blanks % (" " * 120_000))


def test_what_workers_get_is_bounded_for_every_kind() -> None:
    """Written out as rules, 126 KB of expression are 5 MB."""
    with pytest.raises(InvalidRequest, match="too complex"):
        spec_of(OutputKind.REGEX, r"[^\w\s\d]" * 14_000)
