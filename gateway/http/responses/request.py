"""From a body of the Responses API to a prepared request and the writer of its answer. Knows no sockets."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from common.errors import InvalidRequest
from gateway.chat.answer import ChatAnswer
from gateway.chat.fields import ChatFields
from gateway.chat.prepare import PreparedChat, prepare_chat
from gateway.chat.reasoning import effort_variables
from gateway.chat.request import ChatInput
from gateway.generation import ServingLimits
from gateway.http.call import options_of
from gateway.http.formats import Json
from gateway.http.logprobs import chat_logprobs
from gateway.http.responses.items import Conversation, new_id, read_input
from gateway.http.responses.output import Output
from gateway.http.responses.refused import check_fields
from gateway.http.responses.schemas import ResponseBody
from gateway.http.responses.store import ResponseStore, find
from gateway.http.responses.structure import checked_grammar_of_body, text_json
from gateway.http.responses.tools import ToolUse, tool_json, tool_use
from gateway.http.responses.writer import Keeping, ResponseHead, ResponseWriter
from gateway.options import GenerationOptions
from gateway.serving import ServingModel
from gateway.validation import PreparedRequest, check_options

_LOGPROBS = "message.output_text.logprobs"
#: What the shared checks call what this API calls otherwise.
_OWN_NAMES = {"logprobs": "top_logprobs"}


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A request ready to be answered."""

    prepared: PreparedRequest
    writer: ResponseWriter
    stream: bool


async def response_call(
    body: ResponseBody, model: ServingModel, limits: ServingLimits, store: ResponseStore, tenant: str
) -> ResponseCall:
    """Raises NotFound (model), InvalidRequest naming the field, or StoreUnavailable."""
    name = model.check_name(body.model)
    check_fields(body)
    use = tool_use(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    given = [] if body.input is None else read_input(body.input)
    if not given:
        raise InvalidRequest("input is missing", field="input")
    earlier = await _earlier(body.previous_response_id, store, tenant)
    response_id = new_id("resp")
    with _own_names():
        chat = await _prepare(body, model, limits, use, earlier, given, response_id)
    logprobs = chat.prepared.generation.params.logprobs is not None
    output = Output(
        ChatAnswer(chat.new_parser), lambda tokens: chat_logprobs(model.tokenizer, tokens) if logprobs else []
    )
    head = ResponseHead(response_id, {"model": name, **_echo(body, chat.prepared)})
    wanted = store.enabled and body.store is not False
    writer = ResponseWriter(head, output, Keeping(store, tenant, [*earlier, *given], wanted))
    return ResponseCall(chat.prepared, writer, bool(body.stream))


async def _earlier(previous: str | None, store: ResponseStore, tenant: str) -> list[Json]:
    """Items of the conversation that the request goes on from."""
    if previous is None:
        return []
    if not store.enabled:
        message = "previous_response_id: this server stores no responses; send the whole conversation as input"
        raise InvalidRequest(message, field="previous_response_id", code="unsupported_parameter")
    stored = await find(store, tenant, previous)
    if stored is None:
        message = f"the previous response {previous[:64]!r} was not found"
        raise InvalidRequest(message, field="previous_response_id", code="previous_response_not_found")
    if stored.status == "failed":
        raise InvalidRequest("the previous response failed", field="previous_response_id")
    return await stored.conversation()


async def _prepare(
    body: ResponseBody,
    model: ServingModel,
    limits: ServingLimits,
    use: ToolUse,
    earlier: Sequence[Json],
    given: Sequence[Json],
    response_id: str,
) -> PreparedChat:
    conversation = _conversation(body, earlier, given)
    chat = ChatInput(
        turns=tuple(conversation.turns),
        tools=use.tools,
        tool_choice=use.choice,
        parallel_tool_calls=use.parallel,
        template_variables=_variables(body),
    )
    fields = ChatFields(
        messages="input",
        turns=tuple(conversation.names),
        function="",
        tools=use.names,
        grammar="text.format",
        max_tokens="max_output_tokens",
    )
    return await prepare_chat(model, chat, await _options(body, limits), limits, request_id=response_id, fields=fields)


def _conversation(body: ResponseBody, earlier: Sequence[Json], given: Sequence[Json]) -> Conversation:
    """Instructions are those of this request alone: earlier ones are not carried over."""
    conversation = Conversation()
    if body.instructions is not None:
        conversation.instruct(body.instructions)
    names = ["input"] if isinstance(body.input, str) else [f"input[{index}]" for index in range(len(given))]
    conversation.extend([*earlier, *given], [*(["previous_response_id"] * len(earlier)), *names])
    conversation.close()
    return conversation


def _variables(body: ResponseBody) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    return effort_variables(effort) | (body.chat_template_kwargs or {})


async def _options(body: ResponseBody, limits: ServingLimits) -> GenerationOptions:
    wanted = _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    options = options_of(body, max_tokens=body.max_output_tokens, logprobs=(body.top_logprobs or 0) if wanted else None)
    check_options(options, limits.vocab_size)
    return replace(options, grammar=await checked_grammar_of_body(body))


def _echo(body: ResponseBody, prepared: PreparedRequest) -> Mapping[str, Any]:
    """The parameters as they are in force; those that are only kept for the client as it sent them."""
    params = prepared.generation.params
    reasoning = body.reasoning
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "flex" if body.service_tier == "flex" else "default",
        "temperature": params.temperature,
        "text": text_json(body.text),
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool_json(tool) for tool in body.tools or ()],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


@contextmanager
def _own_names() -> Iterator[None]:
    """Complaints of shared code in the words of this API."""
    try:
        yield
    except InvalidRequest as error:
        own = _OWN_NAMES.get(error.field or "")
        if own is None:
            raise
        raise type(error)(error.message.replace(str(error.field), own), field=own, code=error.code) from error
