"""What an answer can be held to, as a value, and the grammar that workers are given for it. Knows no API."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from common.errors import InvalidRequest
from common.sampling import GrammarKind, GrammarSpec
from gateway.structured.ebnf import check_text, choice_grammar, ebnf_grammar
from gateway.structured.json_schema import schema_grammar
from gateway.structured.limits import MAX_GRAMMAR_BYTES, MAX_REGEX_POSITIONS
from gateway.structured.regex.forms import full_match, only, positions
from gateway.structured.regex.parse import RegexError, parse_regex
from gateway.structured.regex.render import as_ebnf
from gateway.structured.regex.tree import ANY_RANGES, NOTHING


class OutputKind(Enum):
    """The constraint's language."""

    #: `constraint` is a JSON value: an object, true or false.
    JSON_SCHEMA = "json_schema"
    #: One JSON object; no constraint.
    JSON_OBJECT = "json_object"
    #: A regular expression that the whole text matches.
    REGEX = "regex"
    #: Extended Backus-Naur form.
    GRAMMAR = "grammar"
    #: A tuple of texts, one of which it is.
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One constraint, unchecked."""

    kind: OutputKind
    constraint: Any = None
    #: Refuse parts of a JSON schema that cannot be enforced; otherwise they are left out.
    strict: bool = True


def grammar_of(output: StructuredOutput, *, field: str) -> GrammarSpec:
    """The checked grammar. Takes up to a few seconds. Raises InvalidRequest naming `field`, and the place in it."""
    grammar = _grammar_of(output, field)
    if len(grammar.source.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{field} is too complex", field=field)
    return grammar


def _grammar_of(output: StructuredOutput, field: str) -> GrammarSpec:
    match output.kind:
        case OutputKind.JSON_SCHEMA:
            return schema_grammar(output.constraint, field=field, strict=output.strict)
        case OutputKind.JSON_OBJECT:
            return GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
        case OutputKind.REGEX:
            return _regex_grammar(output.constraint, field=field)
        case OutputKind.GRAMMAR:
            return ebnf_grammar(output.constraint, field=field)
        case OutputKind.CHOICE:
            return choice_grammar(output.constraint, field=field)


def _regex_grammar(pattern: str, *, field: str) -> GrammarSpec:
    """As rules: workers' compiler reads those as they are meant, regular expressions not always."""
    check_text(pattern, field=field)
    try:
        tree = only(full_match(parse_regex(pattern)), ANY_RANGES)
    except RegexError as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from error
    if tree == NOTHING:
        raise InvalidRequest(f"{field}: no text can match it", field=field)
    if positions(tree) > MAX_REGEX_POSITIONS:
        raise InvalidRequest(
            f"{field}: has more than {MAX_REGEX_POSITIONS} characters, repetitions counted", field=field
        )
    return GrammarSpec(GrammarKind.EBNF, f"root ::= {as_ebnf(tree)}\n")
