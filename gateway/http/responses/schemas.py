"""Bodies of the Responses API as clients send them: names and types only; what they mean is `items` and `request`'s."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from gateway.chat.tools.check import MAX_TOOLS
from gateway.http.limits import MAX_MESSAGES, MAX_PARTS, Bounded
from gateway.http.schemas import Body, GenerationBody


class InputPart(Body):
    """A piece of a message, of a tool's output or of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _content_kind(value: Any) -> str | None:
    return "|text" if isinstance(value, str) else "|parts" if isinstance(value, list) else None


InputContent = Annotated[
    Annotated[str, Tag("|text")] | Annotated[list[InputPart], Bounded(MAX_PARTS), Tag("|parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of parts",
    ),
]


class InputItem(Body):
    """Any kind of input item: its `type` says which fields count."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: InputContent | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: InputContent | None = None
    summary: Annotated[list[InputPart], Bounded(MAX_PARTS)] | None = None


def _input_kind(value: Any) -> str | None:
    return "|text" if isinstance(value, str) else "|items" if isinstance(value, list) else None


Input = Annotated[
    Annotated[str, Tag("|text")] | Annotated[list[InputItem], Bounded(MAX_MESSAGES), Tag("|items")],
    Discriminator(
        _input_kind, custom_error_type="input_type", custom_error_message="Input should be a string or a list of items"
    ),
]


class ResponseTool(Body):
    """A tool; only functions are served, and they are not nested as in chat completions."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Body):
    """`text.format`: a JSON schema stands beside its name, not nested as in chat completions."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


def _choice_kind(value: Any) -> str | None:
    return "|mode" if isinstance(value, str) else "|object" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[str, Tag("|mode")] | Annotated[dict[str, Any], Tag("|object")],
    Discriminator(
        _choice_kind, custom_error_type="choice_type", custom_error_message="Input should be a string or an object"
    ),
]


class ResponseBody(GenerationBody):
    """POST /v1/responses."""

    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: Annotated[list[str], Bounded()] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[ResponseTool], Bounded(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: str | None = None
    background: bool | None = None
    metadata: Annotated[dict[str, str], Bounded()] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
