"""From the gRPC message `StructuredOutput` to a checked grammar."""

from common.errors import InvalidRequest
from common.pb.tandem.v1 import inference_pb2
from common.sampling import GrammarSpec
from gateway.structured.complaints import Complaints
from gateway.structured.json_values import parse_json
from gateway.structured.output import OutputKind, StructuredOutput, grammar_of


def grammar_from_proto(
    message: inference_pb2.StructuredOutput, *, field: str = "options.structured_output"
) -> GrammarSpec | None:
    """None if the message holds no constraint. Raises InvalidRequest naming the field within `field`."""
    kind = message.WhichOneof("constraint")
    if kind is None:
        return None
    strict = message.strict if message.HasField("strict") else True
    name = f"{field}.{kind}"
    match kind:
        case "json_schema":
            schema = parse_json(message.json_schema, Complaints(name, strict))
            return grammar_of(StructuredOutput(OutputKind.JSON_SCHEMA, schema, strict), field=name)
        case "json_object":
            if not message.json_object:
                raise InvalidRequest(f"{name} must be true if it is there", field=name)
            return grammar_of(StructuredOutput(OutputKind.JSON_OBJECT), field=name)
        case "regex":
            return grammar_of(StructuredOutput(OutputKind.REGEX, message.regex), field=name)
        case "grammar":
            return grammar_of(StructuredOutput(OutputKind.GRAMMAR, message.grammar), field=name)
    texts = tuple(message.choice.texts)
    return grammar_of(StructuredOutput(OutputKind.CHOICE, texts), field=f"{name}.texts")
