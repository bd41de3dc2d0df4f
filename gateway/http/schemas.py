"""Bodies of the OpenAI API as clients send them: names and types only. Ranges are `gateway.validation`'s.

Every field may be null, which is the same as leaving it out. Fields that are not listed are kept apart and either
refused (`refused.py`) or ignored.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from gateway.chat.tools.check import MAX_TOOLS
from gateway.http.limits import MAX_BIASES, MAX_CALLS, MAX_MESSAGES, MAX_PARTS, Bounded
from gateway.validation import MAX_CHOICES

#: Marks union members in pydantic's error locations, so that they can be left out of field names.
TAG_PREFIX = "|"


class Body(BaseModel):
    """Numbers must be numbers and strings strings: nothing is converted."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


def _stop_kind(value: Any) -> str | None:
    return "|string" if isinstance(value, str) else "|list" if isinstance(value, list) else None


Stop = Annotated[
    Annotated[str, Tag("|string")] | Annotated[list[str], Bounded(), Tag("|list")],
    Discriminator(
        _stop_kind, custom_error_type="stop_type", custom_error_message="Input should be a string or a list of strings"
    ),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Bounded()] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Bounded(MAX_BIASES)] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    service_tier: str | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Bounded()] | None = None
    guided_grammar: str | None = None
    #: Ignored: there is one.
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None


class ContentPart(Body):
    type: str
    text: str | None = None


def _content_kind(value: Any) -> str | None:
    return "|text" if isinstance(value, str) else "|parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("|text")] | Annotated[list[ContentPart], Bounded(MAX_PARTS), Tag("|parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class CalledFunction(Body):
    name: str | None = None
    arguments: str | None = None


class MessageToolCall(Body):
    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None


class ChatMessage(Body):
    role: str | None = None
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Bounded(MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    #: vLLM's newer word for the same.
    reasoning: str | None = None


class FunctionBody(Body):
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    type: str | None = None
    function: FunctionBody | None = None


class ChosenFunction(Body):
    name: str | None = None


class ChosenTool(Body):
    type: str | None = None
    function: ChosenFunction | None = None


class AllowedTools(Body):
    mode: str | None = None
    tools: Annotated[list[ChosenTool], Bounded(MAX_TOOLS)] | None = None


class ToolChoiceBody(ChosenTool):
    allowed_tools: AllowedTools | None = None


def _choice_kind(value: Any) -> str | None:
    return "|mode" if isinstance(value, str) else "|object" if isinstance(value, dict) else None


ToolChoiceField = Annotated[
    Annotated[str, Tag("|mode")] | Annotated[ToolChoiceBody, Tag("|object")],
    Discriminator(
        _choice_kind, custom_error_type="choice_type", custom_error_message="Input should be a string or an object"
    ),
]


Messages = Annotated[list[ChatMessage], Bounded(MAX_MESSAGES)]


class ChatBody(GenerationBody):
    """What stands beside the messages of a chat."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[ToolBody], Bounded(MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    #: As SGLang: false leaves thoughts in the content.
    separate_reasoning: bool | None = None
    echo: bool | None = None


class ChatCompletionBody(ChatBody):
    """POST /v1/chat/completions."""

    messages: Messages


def _prompt_kind(value: Any) -> str | None:
    """A list is what its first element says; pydantic then names the element that differs."""
    if isinstance(value, str):
        return "|text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "|texts" if isinstance(first, str) else "|id_lists" if isinstance(first, list) else "|ids"


Prompt = Annotated[
    Annotated[str, Tag("|text")]
    | Annotated[list[str], Bounded(MAX_CHOICES), Tag("|texts")]
    | Annotated[list[int], Bounded(), Tag("|ids")]
    | Annotated[list[Annotated[list[int], Bounded()]], Bounded(MAX_CHOICES), Tag("|id_lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, token ids, or a non-empty list of either",
    ),
]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
