"""`text.format` and vLLM's fields: what the answer must match, and how that is shown again."""

import asyncio
import re

from common.errors import InvalidRequest
from common.sampling import GrammarSpec
from gateway.http.formats import Json
from gateway.http.responses.schemas import ResponseBody, TextConfig, TextFormat
from gateway.http.structured_fields import checked_grammar
from gateway.structured.output import OutputKind, StructuredOutput, grammar_of

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FIELD = "text.format"


async def checked_grammar_of_body(body: ResponseBody) -> GrammarSpec | None:
    """None: any text. Raises InvalidRequest naming the field."""
    output = None if body.text is None or body.text.format is None else _output(body.text.format)
    others = await checked_grammar(body)
    if output is None:
        return others
    if others is not None:
        raise InvalidRequest(f"{_FIELD}: only one constraint on the output can be given", field=_FIELD)
    field = f"{_FIELD}.schema" if output.kind is OutputKind.JSON_SCHEMA else _FIELD
    return await asyncio.to_thread(grammar_of, output, field=field)


def _output(format_: TextFormat) -> StructuredOutput | None:
    match format_.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutput(OutputKind.JSON_OBJECT)
        case "json_schema":
            return _schema(format_)
    raise InvalidRequest(f"{_FIELD}.type must be text, json_object or json_schema", field=f"{_FIELD}.type")


def _schema(format_: TextFormat) -> StructuredOutput:
    if not _NAME.fullmatch(format_.name or ""):
        raise InvalidRequest(f"{_FIELD}.name must be 1 to 64 letters, digits, _ or -", field=f"{_FIELD}.name")
    if format_.schema_ is None:
        raise InvalidRequest(f"{_FIELD}.schema is missing", field=f"{_FIELD}.schema")
    return StructuredOutput(OutputKind.JSON_SCHEMA, format_.schema_, strict=bool(format_.strict))


def text_json(text: TextConfig | None) -> Json:
    format_: Json = {"type": "text"}
    if text is not None and text.format is not None:
        format_ = {"type": text.format.type}
        if text.format.type == "json_schema":
            format_ |= {
                "name": text.format.name,
                "description": text.format.description,
                "schema": text.format.schema_,
                "strict": bool(text.format.strict),
            }
    return {"format": format_}
