"""`text.format`: what the answer must match, and how that is shown again."""

from common.errors import InvalidRequest
from common.sampling import GrammarSpec
from gateway.http.formats import Json
from gateway.http.responses.schemas import TextConfig


def grammar_of(text: TextConfig | None) -> GrammarSpec | None:
    """None: any text. Raises InvalidRequest naming `text.format…`."""
    if text is None or text.format is None or text.format.type == "text":
        return None
    raise InvalidRequest("text.format is not supported", field="text.format", code="unsupported_parameter")


def text_json(text: TextConfig | None) -> Json:
    format_: Json = {"type": "text"}
    if text is not None and text.format is not None:
        format_ = {"type": text.format.type}
        if text.format.type == "json_schema":
            format_ |= {
                "name": text.format.name,
                "description": text.format.description,
                "schema": text.format.schema_,
                "strict": text.format.strict,
            }
    return {"format": format_}
