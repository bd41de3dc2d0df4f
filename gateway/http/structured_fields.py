"""The HTTP fields that ask for structured output, OpenAI's and vLLM's, as one checked grammar.

Fields: `response_format`, `structured_outputs`, and vLLM's older `guided_json`, `guided_regex`, `guided_choice`,
`guided_grammar`. At most one of them may hold a constraint.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from common.sampling import GrammarSpec
from gateway.http.schemas import GenerationBody
from gateway.structured.complaints import Complaints
from gateway.structured.json_values import parse_json
from gateway.structured.output import OutputKind, StructuredOutput, grammar_of

_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KINDS: Mapping[str, OutputKind] = {
    "json": OutputKind.JSON_SCHEMA,
    "json_object": OutputKind.JSON_OBJECT,
    "regex": OutputKind.REGEX,
    "choice": OutputKind.CHOICE,
    "grammar": OutputKind.GRAMMAR,
}
#: Characters of an unknown key that a complaint repeats.
_SHOWN_KEY = 64
#: What else `structured_outputs` may hold: how vLLM's backends go about it.
_IGNORED = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "backend"})


async def checked_grammar(body: GenerationBody) -> GrammarSpec | None:
    """As `body_grammar`, in a thread: a hostile schema takes seconds, and no length says which one."""
    fields = (body.response_format, body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice)
    if all(field is None for field in (*fields, body.guided_grammar, body.guided_whitespace_pattern)):
        return None
    return await asyncio.to_thread(body_grammar, body)


def body_grammar(body: GenerationBody) -> GrammarSpec | None:
    """What a body asks for, see `grammar_of_fields`."""
    return grammar_of_fields(
        response_format=body.response_format,
        structured_outputs=body.structured_outputs,
        guided={
            "json": body.guided_json,
            "regex": body.guided_regex,
            "choice": body.guided_choice,
            "grammar": body.guided_grammar,
            "whitespace_pattern": body.guided_whitespace_pattern,
        },
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    field: str
    output: StructuredOutput


def grammar_of_fields(
    *,
    response_format: Mapping[str, Any] | None = None,
    structured_outputs: Mapping[str, Any] | None = None,
    guided: Mapping[str, Any] | None = None,
) -> GrammarSpec | None:
    """None if no field holds a constraint; null is the same as leaving a field out.

    Args:
        guided: values of the older fields by their names without `guided_`.

    Raises InvalidRequest naming the field: unknown type, two constraints, or a constraint that is wrong.
    """
    asked = [
        *_from_response_format(response_format or {}),
        *_from_constraints(structured_outputs or {}, "structured_outputs."),
        *_from_constraints(guided or {}, "guided_"),
    ]
    if len(asked) > 1:
        both = f"{asked[0].field} and {asked[1].field}"
        raise InvalidRequest(f"{both}: only one constraint on the output can be given", field=asked[1].field)
    return grammar_of(asked[0].output, field=asked[0].field) if asked else None


def _from_response_format(format_: Mapping[str, Any]) -> list[_Asked]:
    type_ = format_.get("type")
    match type_:
        case "json_object":
            return [_Asked("response_format", StructuredOutput(OutputKind.JSON_OBJECT))]
        case "json_schema":
            return [_from_named_schema(format_.get("json_schema"), "response_format.json_schema")]
        case "text":
            return []
        case "structural_tag" | "grammar" | "regex":
            raise InvalidRequest(
                f"response_format.type: {type_} is not supported",
                field="response_format.type",
                code="unsupported_parameter",
            )
    if not format_:
        return []
    raise InvalidRequest("response_format.type must be text, json_object or json_schema", field="response_format.type")


def _from_named_schema(named: Any, field: str) -> _Asked:
    """OpenAI's `{name, description, schema, strict}`."""
    if not isinstance(named, dict):
        raise InvalidRequest(f"{field} must be an object", field=field)
    name = named.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidRequest(f"{field}.name must be 1 to 64 letters, digits, _ or -", field=f"{field}.name")
    for key, type_, words in (("strict", bool, "true or false"), ("description", str, "a string")):
        if not isinstance(named.get(key), type_ | None):
            raise InvalidRequest(f"{field}.{key} must be {words}", field=f"{field}.{key}")
    schema = named.get("schema")
    if schema is None:
        return _Asked(field, StructuredOutput(OutputKind.JSON_OBJECT))
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field}.schema must be an object", field=f"{field}.schema")
    return _Asked(f"{field}.schema", StructuredOutput(OutputKind.JSON_SCHEMA, schema, bool(named.get("strict"))))


def _from_constraints(values: Mapping[str, Any], prefix: str) -> list[_Asked]:
    """vLLM's: one field for each kind."""
    asked: list[_Asked] = []
    for key, value in values.items():
        field = prefix + key[:_SHOWN_KEY]
        if value is None or key in _IGNORED:
            continue
        if key in ("structural_tag", "whitespace_pattern"):
            raise InvalidRequest(f"{field} is not supported", field=field, code="unsupported_parameter")
        if key not in _KINDS:
            raise InvalidRequest(f"{field} is not known", field=field)
        if key == "json_object" and value is False:
            continue
        asked.append(_Asked(field, StructuredOutput(_KINDS[key], _constraint(key, value, field), strict=False)))
    return asked


def _constraint(key: str, value: Any, field: str) -> Any:
    match key:
        case "json":
            schema = parse_json(value, Complaints(field, strict=False)) if isinstance(value, str) else value
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(f"{field} must be a JSON schema, as an object or as a string", field=field)
            return schema
        case "choice":
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise InvalidRequest(f"{field} must be a list of strings", field=field)
            return tuple(value)
        case "json_object":
            if value is not True:
                raise InvalidRequest(f"{field} must be true or false", field=field)
            return None
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string", field=field)
    return value
