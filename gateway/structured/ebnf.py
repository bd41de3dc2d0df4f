"""Checks a grammar in extended Backus-Naur form before workers compile it, and makes such grammars of fixed texts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import InvalidRequest
from common.sampling import GrammarKind, GrammarSpec
from gateway.structured.limits import (
    MAX_CHOICES,
    MAX_GROUP_DEPTH,
    MAX_REPEAT,
    MAX_SOURCE_BYTES,
)
from gateway.structured.regex.render import quoted

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    |(?P<text>"(?:[^"\\\n\r]|\\[^\n])*")
    |(?P<set>\[(?:[^\]\\\n\r]|\\[^\n])*\])
    |(?P<count>\{\s*(?P<low>[0-9]{1,9})\s*(?:,\s*(?:(?P<high>[0-9]{1,9})\s*)?)?\})
    |(?P<mark>[|*+?])
    |(?P<open>\(=?)
    |(?P<close>\))""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{1,8}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_PLAIN_ESCAPES = frozenset("\"'?\\abefnrtv0[]-^/")


@dataclass(slots=True)
class _Rule:
    """One rule as far as it matters for its check: alternatives, each the names that it needs."""

    at: int
    names: list[tuple[str, int]] = field(default_factory=list)


def ebnf_grammar(source: str, *, field: str) -> GrammarSpec:
    """A grammar whose root rule is `root`.

    Raises InvalidRequest for what is no such grammar: unknown signs, rules that are missing or defined twice,
    brackets that do not match, counts in the wrong order, too long, too deep.
    """
    check_text(source, field=field)
    if "::=" not in source:
        raise InvalidRequest(f"{field}: rules are written `name ::= ...`; Lark is not supported", field=field)
    rules = _Reader(source, field).rules()
    if "root" not in rules:
        raise InvalidRequest(f"{field}: there is no rule `root`", field=field)
    for rule in rules.values():
        for name, at in rule.names:
            if name not in rules:
                raise InvalidRequest(f"{field}: line {_line(source, at)}: there is no rule `{name:.60}`", field=field)
    return GrammarSpec(GrammarKind.EBNF, source)


def choice_grammar(choices: Sequence[str], *, field: str) -> GrammarSpec:
    """Exactly one of the texts. Raises InvalidRequest: none, too many, empty, repeated or too long ones."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{field} must have 1 to {MAX_CHOICES} texts", field=field)
    check_text("".join(choices), field=field)
    seen: set[str] = set()
    for index, text in enumerate(choices):
        if text == "":
            raise InvalidRequest(f"{field}[{index}] is empty", field=f"{field}[{index}]")
        if text in seen:
            raise InvalidRequest(f"{field}[{index}] is there twice", field=f"{field}[{index}]")
        seen.add(text)
    return GrammarSpec(GrammarKind.EBNF, "root ::= " + " | ".join(map(quoted, choices)) + "\n")


def check_text(text: str, *, field: str) -> None:
    """Raises InvalidRequest for text that is too long, or that is not Unicode, or has a NUL, which no grammar has."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} has half of a surrogate pair, which is no character", field=field) from error
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{field} is longer than {MAX_SOURCE_BYTES} bytes", field=field)
    if "\0" in text:
        raise InvalidRequest(f"{field} has a NUL character", field=field)


class _Reader:
    def __init__(self, source: str, field: str) -> None:
        self._source = source
        self._field = field
        self._rules: dict[str, _Rule] = {}
        self._current: _Rule | None = None
        self._depth = 0
        #: Whether something stands before that can be repeated.
        self._repeatable = False

    def rules(self) -> dict[str, _Rule]:
        tokens = self._tokens()
        for index, (kind, match) in enumerate(tokens):
            following = tokens[index + 1][0] if index + 1 < len(tokens) else ""
            self._take(kind, match, following)
        if self._depth:
            raise self._error(len(self._source), "a ( is not closed")
        return self._rules

    def _error(self, at: int, words: str) -> InvalidRequest:
        return InvalidRequest(f"{self._field}: line {_line(self._source, at)}: {words}", field=self._field)

    def _tokens(self) -> list[tuple[str, re.Match[str]]]:
        tokens: list[tuple[str, re.Match[str]]] = []
        at = 0
        while at < len(self._source):
            match = _TOKEN.match(self._source, at)
            if match is None:
                raise self._error(at, f"{self._source[at]!r} is not understood")
            kind = next(name for name in _KINDS if match[name] is not None)
            if kind != "space":
                tokens.append((kind, match))
            at = match.end()
        return tokens

    def _take(self, kind: str, match: re.Match[str], following: str) -> None:
        at, text = match.start(), match[0]
        if kind == "name" and following == "define":
            return self._begin(text, at)
        if kind == "define":
            if self._current is None or self._current.at != -1:
                raise self._error(at, "::= without a name before it")
            self._current.at = at
            return None
        if self._current is None:
            raise self._error(at, "a rule begins with `name ::=`")
        return self._part(kind, match)

    def _begin(self, name: str, at: int) -> None:
        if self._depth:
            raise self._error(at, "a ( is not closed")
        if name in self._rules:
            raise self._error(at, f"the rule `{name:.60}` is defined twice")
        self._current = self._rules[name] = _Rule(-1)
        self._repeatable = False

    def _part(self, kind: str, match: re.Match[str]) -> None:
        at, text = match.start(), match[0]
        assert self._current is not None
        match kind:
            case "name":
                self._current.names.append((text, at))
            case "text" | "set":
                self._check_escapes(text, at)
            case "open":
                self._depth += 1
                if self._depth > MAX_GROUP_DEPTH:
                    raise self._error(at, f"groups are nested more than {MAX_GROUP_DEPTH} deep")
            case "close":
                self._depth -= 1
                if self._depth < 0:
                    raise self._error(at, "a ) without a (")
            case "count":
                self._check_count(match)
        if kind == "count" or (kind == "mark" and text != "|"):
            if not self._repeatable:
                raise self._error(at, f"`{text:.20}` has nothing before it to repeat")
            self._repeatable = False
        else:
            self._repeatable = kind in ("name", "text", "set", "close")

    def _check_count(self, match: re.Match[str]) -> None:
        low, high = int(match["low"]), match["high"]
        if max(low, int(high or 0)) > MAX_REPEAT:
            raise self._error(match.start(), f"a repetition of more than {MAX_REPEAT}")
        if high and int(high) < low:
            raise self._error(match.start(), "a repetition whose bounds are in the wrong order")

    def _check_escapes(self, text: str, at: int) -> None:
        for escape in _ESCAPE.finditer(text):
            if len(escape[1]) == 1 and escape[1] not in _PLAIN_ESCAPES:
                raise self._error(at, f"the escape {escape[0]} is not supported")
            if len(escape[1]) > 1 and not _is_character(int(escape[1][1:], 16)):
                raise self._error(at, f"{escape[0]} is no character")


def _is_character(code: int) -> bool:
    """A code point of Unicode that UTF-8 has: no half of a surrogate pair."""
    return code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF


_KINDS = ("space", "define", "name", "text", "set", "count", "mark", "open", "close")


def _line(source: str, at: int) -> int:
    return source.count("\n", 0, at) + 1
