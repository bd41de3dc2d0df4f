"""From HTTP fields and the gRPC message to a grammar or to a complaint that names the field."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.pb.tandem.v1 import inference_pb2
from common.sampling import GrammarKind
from gateway.http.schemas import ChatCompletionBody
from gateway.http.structured_fields import body_grammar
from gateway.rpc.structured import grammar_from_proto

NOT_ENFORCED = {"type": "array", "uniqueItems": True}
ANY_OBJECT = '{"type":"object"}'


def of_body(**fields: Any) -> Any:
    return body_grammar(ChatCompletionBody.model_validate_json(json.dumps({"messages": [], **fields})))


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


ASKED: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
    ({"response_format": named({"type": "integer"})}, GrammarKind.JSON_SCHEMA, '{"type":"integer"}'),
    ({"response_format": named({"type": "integer"}, strict=True)}, GrammarKind.JSON_SCHEMA, '{"type":"integer"}'),
    ({"response_format": named(None)}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
    ({"response_format": named(NOT_ENFORCED)}, GrammarKind.JSON_SCHEMA, '{"type":"array","items":{}}'),
    ({"response_format": named({}, strict=None, description=None)}, GrammarKind.JSON_SCHEMA, "{}"),
    ({"guided_json": {"type": "null"}}, GrammarKind.JSON_SCHEMA, '{"type":"null"}'),
    ({"guided_json": '{"type": "null"}'}, GrammarKind.JSON_SCHEMA, '{"type":"null"}'),
    ({"guided_json": NOT_ENFORCED}, GrammarKind.JSON_SCHEMA, '{"type":"array","items":{}}'),
    ({"guided_json": {}, "guided_decoding_backend": "outlines"}, GrammarKind.JSON_SCHEMA, "{}"),
    ({"guided_choice": ["a", 'b"\n\\é']}, GrammarKind.EBNF, 'root ::= "a" | "b\\"\\U0000000a\\\\\\U000000e9"\n'),
    ({"guided_grammar": 'root ::= "a"'}, GrammarKind.EBNF, 'root ::= "a"'),
    ({"guided_regex": "^[ab]$"}, GrammarKind.EBNF, "root ::= [\\U00000061-\\U00000062]\n"),
    ({"structured_outputs": {"json": {"type": "null"}}}, GrammarKind.JSON_SCHEMA, '{"type":"null"}'),
    ({"structured_outputs": {"json": True}}, GrammarKind.JSON_SCHEMA, "{}"),
    ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
    ({"structured_outputs": {"choice": ["a"], "regex": None}}, GrammarKind.EBNF, 'root ::= "a"\n'),
    ({"structured_outputs": {"regex": "a", "disable_fallback": True}}, GrammarKind.EBNF, "root ::= [\\U00000061]\n"),
]


@pytest.mark.parametrize(("fields", "kind", "source"), ASKED, ids=str)
def test_fields_become_a_grammar(fields: dict[str, Any], kind: GrammarKind, source: str) -> None:
    spec = of_body(**fields)
    assert (spec.kind, spec.source) == (kind, source)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "guided_json": None, "guided_choice": None, "structured_outputs": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_decoding_backend": "xgrammar"},
    ],
    ids=str,
)
def test_nothing_asked_is_no_grammar(fields: dict[str, Any]) -> None:
    assert of_body(**fields) is None


SCHEMA_FIELD = "response_format.json_schema.schema"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "must be text, json_object or json_schema"),
    ({"response_format": {"schema": {}}}, "response_format.type", "must be"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", "letters"),
    ({"response_format": named({}, name="a b")}, "response_format.json_schema.name", "letters"),
    ({"response_format": named({}, name="a" * 65)}, "response_format.json_schema.name", "letters"),
    ({"response_format": named({}, strict="yes")}, "response_format.json_schema.strict", "true or false"),
    ({"response_format": named({}, description=1)}, "response_format.json_schema.description", "a string"),
    ({"response_format": named([])}, SCHEMA_FIELD, "must be an object"),
    ({"response_format": named(NOT_ENFORCED, strict=True)}, SCHEMA_FIELD, "/uniqueItems: "),
    ({"response_format": named({"type": "x"})}, SCHEMA_FIELD, "/type: "),
    ({"guided_json": 3}, "guided_json", "a JSON schema, as an object or as a string"),
    ({"guided_json": "3"}, "guided_json", "a JSON schema, as an object or as a string"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_json": "[" * 100_000}, "guided_json", "nested more than"),
    ({"guided_json": '{"minimum": NaN}'}, "guided_json", "is not JSON"),
    ({"guided_json": '{"minimum": ' + "9" * 5000 + "}"}, "guided_json", "is not JSON"),
    ({"guided_json": " " * 200_000}, "guided_json", "longer than"),
    ({"guided_choice": []}, "guided_choice", "1 to 1000 texts"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "is empty"),
    ({"guided_choice": ["a", "b", "a"]}, "guided_choice[2]", "is there twice"),
    ({"guided_choice": [str(i) for i in range(1001)]}, "guided_choice", "1 to 1000 texts"),
    ({"guided_choice": ["a\0"]}, "guided_choice", "NUL"),
    ({"guided_choice": ["x" * 200_000]}, "guided_choice", "longer than"),
    ({"guided_regex": "("}, "guided_regex", "is not closed"),
    ({"guided_grammar": "start: A"}, "guided_grammar", "Lark is not supported"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml", "is not known"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "must be a string"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "a list of strings"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json", "only one constraint"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "only one constraint"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "only one constraint"),
]


@pytest.mark.parametrize(("fields", "field", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_body(**fields)
    assert caught.value.field == field
    assert words in caught.value.message
    assert len(caught.value.message) < 400


Message = inference_pb2.StructuredOutput


@pytest.mark.parametrize(
    ("message", "source"),
    [
        (Message(json_schema='{"type": "null"}'), '{"type":"null"}'),
        (Message(json_schema="true"), "{}"),
        (Message(json_schema=json.dumps(NOT_ENFORCED), strict=False), '{"type":"array","items":{}}'),
        (Message(json_object=True), ANY_OBJECT),
        (Message(grammar='root ::= "a"'), 'root ::= "a"'),
        (Message(regex="a*"), "root ::= [\\U00000061]*\n"),
        (Message(choice=Message.Choices(texts=["a", "b"])), 'root ::= "a" | "b"\n'),
    ],
    ids=str,
)
def test_message_becomes_a_grammar(message: Message, source: str) -> None:
    spec = grammar_from_proto(message)
    assert spec is not None
    assert spec.source == source


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message(json_schema=json.dumps(NOT_ENFORCED)), "json_schema"),
        (Message(json_schema=""), "json_schema"),
        (Message(json_object=False), "json_object"),
        (Message(regex="("), "regex"),
        (Message(grammar=""), "grammar"),
        (Message(choice=Message.Choices()), "choice.texts"),
        (Message(choice=Message.Choices(texts=[""])), "choice.texts[0]"),
    ],
    ids=str,
)
def test_message_that_is_wrong_is_named(message: Message, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_from_proto(message)
    assert caught.value.field == f"options.structured_output.{field}"


def test_message_without_a_constraint_is_no_grammar() -> None:
    assert grammar_from_proto(Message()) is None
    assert grammar_from_proto(Message(strict=True)) is None
