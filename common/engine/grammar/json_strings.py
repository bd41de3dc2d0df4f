"""Strings with `minLength` and `maxLength` in grammars of JSON schemas, written so that they take escapes.

The library (xgrammar 0.2.9) writes a bounded string as a counted set of characters, bare control characters among them
and no escapes. Counting a choice instead (a character, or an escape) makes it slow: what one rule of a single character
allows says nothing of tokens with several, so that each of a vocabulary's tokens is tried whenever a mask is made. What
is written here has it decide nearly all of them beforehand:

* Far from the longest length, a character is a rule whose look-ahead says what may follow: `_AHEAD` more characters, or
  the end. The library takes a look-ahead at its word where a rule is used in one place and not as the last part of it;
  hence the rule `text`, which is that one place, with nothing behind the character, written as a rule.
* The last `_AHEAD` characters are a chain of rules, each of which leads through all that may follow.
* Characters are counted in numbers to the base `_BASE`, as blocks of blocks: rules are shared by all strings, and few
  of them are in progress at once. A serialized grammar holds all its rules once for each of them, so they must be few.

Tokens of more than `_AHEAD` characters, and those that go on behind the end of a string, are still tried.
"""

import re
from collections.abc import Callable, Sequence

import xgrammar

#: A character of a string with minLength or maxLength, as the library writes it.
_BOUNDED = r"[^\"\\\r\n]"
#: The same without control characters.
_PLAIN = r"[^\0-\x1f\"\\]"
_SHORT_ESCAPE = r'"\\" [\"\\/bfnrt]'
_HEX = "[0-9A-Fa-f]"
_STRING = re.compile(r'(?P<name>\S+) ::= \(\("\\"" (?P<inside>\S+?)(\{(?P<low>\d+), (?P<high>-?\d+)\})? "\\""\)\)')
#: Characters that are looked ahead. More make masks cheaper, and compiling and what is compiled more expensive.
_AHEAD = 20
_BASE = 4
#: Rules times their letters: about the bytes of the grammar once it is compiled and serialized, without its masks.
#: Well below what `CompileLimits` allows.
_MOST_BYTES = 6 << 20
#: A string's last character, and its first.
_END = r'"\""'
_UNICODE = " | ".join(
    (
        f'"u" [0-9A-CEFa-cef] {_HEX} {_HEX} {_HEX}',
        f'"u" [Dd] [0-7] {_HEX} {_HEX}',
        rf'"u" [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX}',
    )
)


def with_escapes(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """The same, but strings of bounded length take JSON's characters and escapes, one escape being one character.

    No bare control characters, and no half of a surrogate pair. In grammars that are too large for it, strings have no
    escapes if their length has a bound other than 1 at least.
    """
    text = str(grammar)
    if _BOUNDED not in text:
        return grammar
    # A rule a line.
    rules = text.split("\n")
    written = _rewritten(rules, all_lengths=True)
    if len(written) * sum(map(len, written)) > _MOST_BYTES:
        written = _rewritten(rules, all_lengths=False)
    return xgrammar.Grammar.from_ebnf("\n".join(written))


def _rewritten(rules: Sequence[str], *, all_lengths: bool) -> list[str]:
    counted = _CountedStrings(rules)
    lengths = _lengths_of_single(rules)
    written: list[str] = []
    for rule in rules:
        match = _STRING.fullmatch(rule)
        if match is not None and match["inside"] in lengths:
            low, high = lengths[match["inside"]]
            if match["low"]:
                low, high = int(match["low"]), int(match["high"])
            if all_lengths or (low, high) == (1, -1):
                rest = counted.rest(low, None if high < 0 else high)
                rule = f"{match['name']} ::= {_END} {rest}"
        # What is left of the sets is not used any more, or has to do without escapes.
        written.append(rule.replace(_BOUNDED, _PLAIN))
    return written + counted.rules()


def _lengths_of_single(rules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """What matches a character of a string by itself, or one or none: name or set, and the bounds of its length."""
    lengths = {_BOUNDED: (1, 1)}
    for rule in rules:
        name, _, body = rule.partition(" ::= ")
        if body == f"(({_BOUNDED}))":
            lengths[name] = (1, 1)
        elif body == f'("" | ({_BOUNDED}))':
            lengths[name] = (0, 1)
    return lengths


class _CountedStrings:
    """Rules for what follows the quote that begins a string, up to the quote that ends it."""

    def __init__(self, rules: Sequence[str]) -> None:
        """`rules`: of the grammar that these are for; none of its names begins like those that are made."""
        self._prefix = "json_"
        while any(self._prefix in rule for rule in rules):
            self._prefix += "_"
        self._bodies: dict[str, str] = {}

    def rules(self) -> list[str]:
        return [f"{name} ::= {body}" for name, body in self._bodies.items()]

    def rest(self, low: int, high: int | None) -> str:
        """The name of a rule for `low` to `high` characters and the end."""
        return self._rule(f"rest_{low}_{'' if high is None else high}", lambda: self._rest(low, high))

    def _rest(self, low: int, high: int | None) -> str:
        if high is None:
            return self._character(self._endless()) if low == 1 else _sequence([*self._exactly(low), self._endless()])
        if high - low >= _AHEAD:
            return _sequence([*self._exactly(low), self.rest(0, high - low)]) if low else self._at_most(high)
        ahead = min(high, _AHEAD)
        return _sequence([*self._exactly(high - ahead), self._last(max(low - high + ahead, 0), ahead)])

    def _at_most(self, high: int) -> str:
        """Up to `high` characters, at least `_AHEAD`, and the end."""
        options: list[str] = []
        before: list[str] = []
        for level, digit in _digits(high - _AHEAD):
            options.append(_sequence([*before, self._less(level, digit - 1)]))
            before.extend([self._block(level)] * digit)
        return " | ".join([*options, _sequence([*before, self._last(0, _AHEAD)])])

    def _exactly(self, count: int) -> list[str]:
        return [block for level, digit in _digits(count) for block in [self._block(level)] * digit]

    def _block(self, level: int) -> str:
        """`_BASE` to the power of `level` characters, with at least `_AHEAD` more allowed behind them."""
        if level == 0:
            return self._text()
        return self._rule(f"block_{level}", lambda: _sequence([self._block(level - 1)] * _BASE))

    def _less(self, level: int, count: int) -> str:
        """Up to `count` blocks, fewer characters than another one has, and the end."""
        fewer = self._less(level - 1, _BASE - 1) if level else self._end()
        if count == 0:
            return fewer
        name = f"less_{level}_{count}"
        return self._rule(name, lambda: f"{fewer} | {self._block(level)} {self._less(level, count - 1)}")

    def _last(self, low: int, high: int) -> str:
        """`low` to `high` characters and the end, for a small `high`."""

        def body() -> str:
            options = [] if low else [_END]
            if high:
                options.append(self._character(self._last(max(low - 1, 0), high - 1)))
            return " | ".join(options)

        return self._rule(f"last_{low}_{high}", body)

    def _endless(self) -> str:
        return self._rule("endless", lambda: f"{_END} | {self._character(self._prefix + 'endless')}")

    def _end(self) -> str:
        return self._rule("end", lambda: _END)

    def _text(self) -> str:
        """One character, with at least `_AHEAD` more allowed behind it."""
        return self._rule("text", lambda: f"{self._seen_ahead()} {self._nothing()}")

    def _seen_ahead(self) -> str:
        return self._rule("character", lambda: f"{self._character()} (={self._ahead()})")

    def _ahead(self) -> str:
        """`_AHEAD` characters, or fewer and the end."""
        # Nothing may follow one of these, so that little has to be kept for them.
        seen = self._rule("seen", lambda: f"{self._character()} (={self._never()})")
        ends = [_sequence([*[seen] * count, self._end()]) for count in range(_AHEAD)]
        return self._rule("ahead", lambda: " | ".join([*ends, _sequence([seen] * _AHEAD)]))

    def _nothing(self) -> str:
        return self._rule("nothing", lambda: f'"" | {self._never()}')

    def _never(self) -> str:
        return self._rule("never", lambda: f'{self._prefix}never "x"')

    def _character(self, following: str = "") -> str:
        """Alternatives: a character, then `following`."""
        return " | ".join(_sequence([part, following]) for part in (_PLAIN, _SHORT_ESCAPE, rf'"\\" {self._unicode()}'))

    def _unicode(self) -> str:
        r"""`\u` and four digits, or a surrogate pair; without the first backslash."""
        return self._rule("unicode", lambda: _UNICODE)

    def _rule(self, name: str, body: Callable[[], str]) -> str:
        """Its whole name; the body is asked for once."""
        name = self._prefix + name
        if name not in self._bodies:
            self._bodies[name] = body()
        return name


def _sequence(parts: Sequence[str]) -> str:
    return " ".join(part for part in parts if part)


def _digits(number: int) -> list[tuple[int, int]]:
    """Powers and digits to the base `_BASE`, highest first, without zeros."""
    digits: list[tuple[int, int]] = []
    power = 0
    while number:
        number, digit = divmod(number, _BASE)
        if digit:
            digits.append((power, digit))
        power += 1
    return digits[::-1]
