"""Writes the tree of a regular expression anew, in the two languages in which the compiler reads exactly what is meant.

Its own reading of regular expressions (xgrammar 0.2.9) is off in places: in a schema's `pattern` it takes `(-[a]+)?` to
match "a", and `[\\^a]` to match all but "a"; outside of one, `\\x2e0` is one character to it.
"""

from gateway.structured.regex.escapes import (
    MAX_ESCAPED_REPEAT,
    has_escapes,
    long_escapes,
    plain_part,
    short_escapes,
)
from gateway.structured.regex.tree import Alternation, Anchor, Chars, Concat, Node, Ranges, Repeat, union

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _!#%&',:;<=>@`~")
#: Matches the empty text. With a character beyond ASCII in it, a pattern is made into rules, which are right, and not
#: into an automaton, which is not always.
_AS_RULES = "\u00e9{0}"


def as_pattern(tree: Node) -> str:
    """For a JSON schema's `pattern`, which the compiler takes for that of the text between the quotes: without anchors.

    What JSON spells as an escape is written as one, see `regex.escapes`.
    """
    return f"^{_AS_RULES}({_pattern(tree)})$"


def as_ebnf(tree: Node) -> str:
    """The body of a rule in Backus-Naur form. The tree has no anchors and no empty sets or alternations."""
    match tree:
        case Chars():
            return "[" + "".join(map(_ebnf_range, tree.ranges)) + "]"
        case Concat():
            return " ".join(_ebnf_grouped(item) for item in tree.items) if tree.items else '""'
        case Alternation():
            return " | ".join(map(as_ebnf, tree.options))
        case Repeat():
            inner = as_ebnf(tree.item)
            return (inner if isinstance(tree.item, Chars) else f"({inner})") + _count(tree.low, tree.high)
        case Anchor():
            raise AssertionError("anchors are resolved before an expression is written")


def quoted(text: str) -> str:
    """A text as a literal of Backus-Naur form."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _pattern(tree: Node) -> str:
    match tree:
        case Chars():
            return "|".join(_spellings(tree.ranges))
        case Concat():
            return "".join(_grouped(item) if _is_choice(item) else _pattern(item) for item in tree.items)
        case Alternation():
            return "|".join(map(_pattern, tree.options))
        case Repeat():
            if isinstance(tree.item, Chars) and has_escapes(tree.item.ranges):
                return _repeated_choice(_grouped(tree.item), tree.low, tree.high)
            inner = _pattern(tree.item) if isinstance(tree.item, Chars) else _grouped(tree.item)
            return inner + _count(tree.low, tree.high)
        case Anchor():
            raise AssertionError("anchors are resolved before an expression is written")


def _grouped(tree: Node) -> str:
    return f"({_pattern(tree)})"


def _is_choice(tree: Node) -> bool:
    return isinstance(tree, Alternation) or (isinstance(tree, Chars) and has_escapes(tree.ranges))


def _repeated_choice(item: str, low: int, high: int | None) -> str:
    """Written out as loops and options: what is counted is a rule of its own to the compiler, which makes it slow.

    Only escapes that nothing else can stand for are repeated more often. They are counted, for options within options
    go no deeper than the compiler allows.
    """
    if high is None:
        return item * low + f"{item}*"
    if high - low > MAX_ESCAPED_REPEAT:
        return item + _count(low, high)
    return item * low + f"({item}" * (high - low) + ")?" * (high - low)


def _spellings(ranges: Ranges) -> list[str]:
    """Expressions for the characters of a set as JSON's strings have them."""
    plain, short = plain_part(ranges), short_escapes(ranges)
    return [
        *([_pattern_set(plain)] if plain else []),
        *([r"\\" + _pattern_set(union((ord(sign), ord(sign)) for sign in short))] if short else []),
        *(rf"\\u00{high}{_hex_set(low)}" for high, low in long_escapes(ranges)),
    ]


def _hex_set(digits: str) -> str:
    both = digits.lower() + digits.upper()
    return _pattern_set(union((ord(digit), ord(digit)) for digit in both))


def _pattern_set(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _pattern_char(ranges[0][0])
    return "[" + "".join(map(_pattern_range, _caret_last(ranges))) + "]"


def _caret_last(ranges: Ranges) -> Ranges:
    """A set that begins with a caret is read as its contrary, even if the caret is escaped."""
    caret = ord("^")
    low, high = ranges[0]
    if low != caret:
        return ranges
    rest = ((caret + 1, high), *ranges[1:]) if high > caret else ranges[1:]
    return (*rest, (caret, caret))


def _pattern_range(bounds: tuple[int, int]) -> str:
    low, high = map(_pattern_char, bounds)
    return low if low == high else f"{low}-{high}"


def _pattern_char(code: int) -> str:
    assert code >= 0x20, "JSON's plain characters have no control characters"
    character = chr(code)
    return character if character in _PLAIN or code >= 0x7F else "\\" + character


def _ebnf_grouped(item: Node) -> str:
    return f"({as_ebnf(item)})" if isinstance(item, Alternation) else as_ebnf(item)


def _ebnf_range(bounds: tuple[int, int]) -> str:
    low, high = (f"\\U{code:08x}" for code in bounds)
    return low if low == high else f"{low}-{high}"


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if " " <= character <= "~" else f"\\U{ord(character):08x}"


def _count(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"
