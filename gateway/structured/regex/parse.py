"""Reads regular expressions: what ECMAScript and Python's `re` read alike, and nothing that a grammar cannot say."""

import re
from collections.abc import Mapping

from gateway.structured.limits import MAX_GROUP_DEPTH, MAX_REPEAT
from gateway.structured.regex.tree import (
    EMPTY,
    Anchor,
    Chars,
    Node,
    Ranges,
    Repeat,
    char,
    choice,
    complement,
    sequence,
    union,
)

_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = ((0x09, 0x0D), (0x20, 0x20))
#: What either dialect calls white space; `\S` must not match any of it.
_ANY_SPACE = union(
    (ord(low), ord(high))
    for low, high in (
        ("\t", "\r"),
        ("\x1c", " "),
        ("\x85", "\x85"),
        ("\xa0", "\xa0"),
        ("\u1680", "\u1680"),
        ("\u2000", "\u200a"),
        ("\u2028", "\u2029"),
        ("\u202f", "\u202f"),
        ("\u205f", "\u205f"),
        ("\u3000", "\u3000"),
        ("\ufeff", "\ufeff"),
    )
)
_SETS: dict[str, Ranges] = {
    "d": _DIGITS,
    "D": complement(_DIGITS),
    "w": _WORD,
    "W": complement(_WORD),
    "s": _SPACE,
    "S": complement(_ANY_SPACE),
}
#: What may belong to them in one dialect or the other: for sets that are negated.
_WIDE_SETS: Mapping[str, Ranges] = _SETS | {"s": _ANY_SPACE, "S": complement(_SPACE)}
_NOT_LINE_END = complement(union([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]))
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_CODE_POINT = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|U([0-9A-Fa-f]{8})")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_COUNT = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_GROUP_NAME = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_UNSUPPORTED_GROUPS = {
    "?=": "look-ahead",
    "?!": "negative look-ahead",
    "?<=": "look-behind",
    "?<!": "negative look-behind",
    "?P=": "a backreference",
    "?P>": "a recursive pattern",
    "?(": "a conditional group",
    "?>": "an atomic group",
    "?#": "a comment",
}


class RegexError(ValueError):
    """Cannot be read, or says what no grammar can; the words say what and at which character."""


def parse_regex(pattern: str) -> Node:
    """The tree; anchors stay in it. Raises RegexError."""
    return _Parser(pattern).parse()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        #: Escapes like `\s` in the present set.
        self._kinds: set[str] = set()

    def parse(self) -> Node:
        tree = self._alternation()
        if self._at < len(self._pattern):
            raise self._error("a ) without a (")
        return tree

    def _error(self, words: str) -> RegexError:
        return RegexError(f"{words} at character {self._at + 1}")

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _skip(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _alternation(self) -> Node:
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        return choice(options)

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._at < len(self._pattern) and self._peek() not in "|)":
            items.append(self._quantified())
        return sequence(items)

    def _quantified(self) -> Node:
        atom = self._atom()
        low, high = self._quantifier()
        if (low, high) == (1, 1):
            return atom
        self._skip("?")  # how eagerly it matches does not change what it matches
        if self._peek() == "+":
            raise self._error("a possessive quantifier is not supported")
        if self._peek() in ("*", "?") or _COUNT.match(self._pattern, self._at):
            raise self._error("a quantifier on a quantifier")
        if isinstance(atom, Anchor):
            raise self._error("a quantifier on an anchor")
        return EMPTY if high == 0 else Repeat(atom, low, high)

    def _quantifier(self) -> tuple[int, int | None]:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip(mark):
                return bounds
        if self._pattern.startswith("{,", self._at):
            raise self._error("{,n} is read differently by different engines; write {0,n}")
        match = _COUNT.match(self._pattern, self._at)
        if match is None:
            return 1, 1
        low = _bounded(match[1])
        high = low if match[2] is None else _bounded(match[3]) if match[3] else None
        if max(low, high or 0) > MAX_REPEAT:
            raise self._error(f"a repetition of more than {MAX_REPEAT}")
        if high is not None and high < low:
            raise self._error("a repetition whose bounds are in the wrong order")
        self._at = match.end()
        return low, high

    def _atom(self) -> Node:
        character = self._peek()
        if character in ("*", "+", "?") or _COUNT.match(self._pattern, self._at):
            raise self._error("a quantifier with nothing before it")
        self._at += 1
        match character:
            case "(":
                return self._group()
            case "[":
                return Chars(self._set())
            case ".":
                return Chars(_NOT_LINE_END)
            case "^":
                return Anchor(end=False)
            case "$":
                return Anchor(end=True)
            case "\\":
                return self._escape()
        return char(character)

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise self._error(f"groups nested more than {MAX_GROUP_DEPTH} deep")
        self._group_kind()
        tree = self._alternation()
        if not self._skip(")"):
            raise self._error("a ( that is not closed")
        self._depth -= 1
        return tree

    def _group_kind(self) -> None:
        """What stands behind the bracket: captures and names mean nothing here."""
        if self._peek() != "?" or self._skip("?:"):
            return
        for mark, words in _UNSUPPORTED_GROUPS.items():
            if self._pattern.startswith(mark, self._at):
                raise self._error(f"{words} is not supported")
        name = _GROUP_NAME.match(self._pattern, self._at)
        if name is None:
            raise self._error("a flag group is not supported")
        self._at = name.end()

    def _escape(self) -> Node:
        character = self._peek()
        match character:
            case "b" | "B":
                raise self._error("a word boundary is not supported")
            case "k" | "1" | "2" | "3" | "4" | "5" | "6" | "7" | "8" | "9":
                raise self._error("a backreference is not supported")
            case "A":
                self._at += 1
                return Anchor(end=False)
            case "Z" | "z":
                self._at += 1
                return Anchor(end=True)
        return Chars(self._escaped_set(_SETS))

    def _escaped_set(self, sets: Mapping[str, Ranges]) -> Ranges:
        """What an escape stands for, inside and outside of brackets; `_at` is behind the backslash."""
        character = self._peek()
        if character in sets:
            self._at += 1
            self._kinds.add(character)
            return sets[character]
        code = self._code_point(character)
        return ((code, code),)

    def _code_point(self, character: str) -> int:
        match = _CODE_POINT.match(self._pattern, self._at)
        if match is not None:
            self._at = match.end()
            return self._paired(int(next(digits for digits in match.groups() if digits), 16))
        if character in ("p", "P"):
            raise self._error("a Unicode property is not supported")
        if character in _CONTROLS:
            self._at += 1
            return ord(_CONTROLS[character])
        if character == "0" and not self._pattern[self._at + 1 : self._at + 2].isdigit():
            self._at += 1
            return 0
        if character == "" or character.isalnum():
            raise self._error(f"the escape \\{character} is not supported")
        self._at += 1
        return ord(character)

    def _paired(self, code: int) -> int:
        """Two escaped halves of a surrogate pair are one character."""
        if code > 0x10FFFF:
            raise self._error("a code point beyond Unicode")
        if not 0xD800 <= code <= 0xDFFF:
            return code
        low = _LOW_SURROGATE.match(self._pattern, self._at)
        if code > 0xDBFF or low is None:
            raise self._error("half of a surrogate pair")
        self._at = low.end()
        return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00

    def _set(self) -> Ranges:
        negated = self._skip("^")
        sets = _WIDE_SETS if negated else _SETS
        parts: list[tuple[int, int]] = []
        self._kinds = set()
        if self._peek() == "]":
            raise self._error("a ] at the beginning of a set is read differently by different engines; escape it")
        while not self._skip("]"):
            if self._at >= len(self._pattern):
                raise self._error("a [ that is not closed")
            parts.extend(self._set_part(sets))
        if any(kind.swapcase() in self._kinds for kind in self._kinds):
            parts.append((0, 0x10FFFF))  # [\s\S] is a usual way of writing "any character"
        return complement(union(parts)) if negated else union(parts)

    def _set_part(self, sets: Mapping[str, Ranges]) -> Ranges:
        first = self._set_member(sets)
        follows = self._pattern[self._at + 1 : self._at + 2]
        if self._peek() != "-" or follows in ("]", ""):
            return first
        self._at += 1
        last = self._set_member(sets)
        single = all(len(part) == 1 and part[0][0] == part[0][1] for part in (first, last))
        if not single:
            raise self._error("a range between sets")
        if first[0][0] > last[0][0]:
            raise self._error("a range in the wrong order")
        return ((first[0][0], last[0][0]),)

    def _set_member(self, sets: Mapping[str, Ranges]) -> Ranges:
        character = self._peek()
        self._at += 1
        if character == "[" and self._peek() in (":", ".", "="):
            raise self._error("a POSIX class is not supported")
        if character != "\\":
            return ((ord(character), ord(character)),)
        if self._peek() == "b":
            self._at += 1
            return ((8, 8),)
        return self._escaped_set(sets)


def _bounded(digits: str) -> int:
    """Too many digits are as good as too large a number."""
    return int(digits) if len(digits) < 10 else MAX_REPEAT + 1
