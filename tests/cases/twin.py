"""The gRPC twin of an HTTP request: the same fields over `tandem.v1.Inference`, and what came back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.pb.tandem.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from tests.cases.case_data import Json, Variant
from tests.e2e.cluster import PATIENCE

Request = inference_pb2.GenerateRequest | inference_pb2.ChatRequest

#: HTTP status to the names of gRPC statuses that mean the same.
STATUSES: Mapping[int, set[str]] = {
    200: {"OK"},
    400: {"INVALID_ARGUMENT"},
    401: {"UNAUTHENTICATED"},
    404: {"NOT_FOUND"},
    413: {"RESOURCE_EXHAUSTED"},
    429: {"RESOURCE_EXHAUSTED"},
    503: {"UNAVAILABLE"},
    504: {"DEADLINE_EXCEEDED"},
}
FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}

#: Fields with the same name and meaning.
_SAME = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "cache_salt", "priority"),
        *("include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
    }
)
#: Fields that say how HTTP answers.
_HTTP_ONLY = frozenset({"stream", "stream_options", "model", "prompt", "messages"})


class NotExpressible(Exception):
    """A message of this type cannot hold that value: no client can send it."""


@dataclass
class TwinReply:
    code: grpc.StatusCode
    details: str = ""
    #: The offending field, out of the trailing metadata.
    param: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    summary: inference_pb2.GenerationSummary | None = None


def twin_request(variant: Variant) -> Request:
    """The twin of a request to /v1/completions or /v1/chat/completions. Raises NotExpressible."""
    body = variant.body
    if variant.method != "POST" or not isinstance(body, dict):
        raise NotExpressible(variant.name)
    paths: Mapping[str, Callable[[Json], Request]] = {"/v1/completions": _generate, "/v1/chat/completions": _chat}
    if variant.path not in paths:
        raise NotExpressible(variant.path)
    try:
        return paths[variant.path](body)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise NotExpressible(f"{variant.name}: {error}") from error


def call_twin(target: str, request: Request, *, metadata: tuple[tuple[str, str], ...] = ()) -> TwinReply:
    """Send it to the gateway at `target` and read all."""
    with grpc.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        method = stub.Chat if isinstance(request, inference_pb2.ChatRequest) else stub.Generate
        call = method(request, timeout=4 * PATIENCE, metadata=metadata)
        reply = TwinReply(grpc.StatusCode.OK)
        try:
            for response in call:
                _add(reply, response)
        except grpc.RpcError:
            trailing = dict(call.trailing_metadata() or ())
            return TwinReply(call.code(), call.details() or "", str(trailing.get("tandem-field", "")))
        assert reply.summary is not None, "OK without a summary"
        return reply


def _add(reply: TwinReply, response: inference_pb2.GenerateResponse) -> None:
    if response.WhichOneof("event") == "summary":
        reply.summary = response.summary
    elif response.WhichOneof("event") == "delta":
        delta = response.delta
        reply.texts[delta.choice] = reply.texts.get(delta.choice, "") + delta.text
        if delta.finish_reason in FINISH_REASONS:
            reply.finish_reasons[delta.choice] = FINISH_REASONS[delta.finish_reason]


def _generate(body: Json) -> inference_pb2.GenerateRequest:
    prompt = body["prompt"]
    request = inference_pb2.GenerateRequest(model=body.get("model", ""), options=_options(body, {}))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def _chat(body: Json) -> inference_pb2.ChatRequest:
    own = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    request = inference_pb2.ChatRequest(
        model=body.get("model", ""),
        messages=[_message(message) for message in body.get("messages") or ()],
        options=_options(body, own),
    )
    for name, value in own.items():
        _CHAT_FIELDS[name](request, value)
    return request


def _message(message: Json) -> inference_pb2.ChatMessage:
    known = {"role", "content", "name", "tool_call_id", "tool_calls"}
    if unknown := message.keys() - known:
        raise ValueError(f"no field for {unknown}")
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    plain = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if name in message}
    if plain.get("content") is None:
        plain.pop("content", None)
    if "role" in plain and plain["role"] is None:
        raise ValueError("a role is a string")
    return inference_pb2.ChatMessage(tool_calls=calls, **plain)


def _call(call: Json) -> inference_pb2.ToolCall:
    function = call["function"]
    return inference_pb2.ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"])


def _set_tools(request: inference_pb2.ChatRequest, tools: list[Json]) -> None:
    for tool in tools:
        function = tool["function"]
        parameters = json.dumps(function["parameters"]) if "parameters" in function else ""
        request.tools.add(name=function["name"], description=function.get("description", ""), parameters=parameters)


def _set_tool_choice(request: inference_pb2.ChatRequest, choice: Any) -> None:
    if isinstance(choice, str):
        mode = inference_pb2.ToolChoice.Mode.Value(f"MODE_{choice.upper()}")
        request.tool_choice.CopyFrom(inference_pb2.ToolChoice(mode=mode))
    else:
        request.tool_choice.CopyFrom(inference_pb2.ToolChoice(function=choice["function"]["name"]))


_CHAT_FIELDS: Mapping[str, Callable[[inference_pb2.ChatRequest, Any], None]] = {
    "tools": _set_tools,
    "tool_choice": _set_tool_choice,
    "parallel_tool_calls": lambda request, value: setattr(request, "parallel_tool_calls", value),
    "chat_template_kwargs": lambda request, value: setattr(request, "chat_template_kwargs", json.dumps(value)),
    "add_generation_prompt": lambda request, value: setattr(request, "add_generation_prompt", value),
    "continue_final_message": lambda request, value: setattr(request, "continue_final_message", value),
}


def _options(body: Json, elsewhere: Mapping[str, Any]) -> inference_pb2.GenerationOptions:
    """Options out of the fields of a body that are not `elsewhere` in the request."""
    given = {name: v for name, v in body.items() if v is not None and name not in _HTTP_ONLY and name not in elsewhere}
    options = inference_pb2.GenerationOptions(**{name: given.pop(name) for name in _SAME & given.keys()})
    if "max_completion_tokens" in given:
        options.max_tokens = given.pop("max_completion_tokens")
    if "stop" in given:
        stop = given.pop("stop")
        options.stop.extend([stop] if isinstance(stop, str) else stop)
    for id_, bias in given.pop("logit_bias", {}).items():
        options.logit_bias[int(id_)] = bias
    _set_logprobs(options, given)
    if constraint := _constraint(given):
        options.structured_output.CopyFrom(constraint)
    if given:
        raise ValueError(f"no field for {set(given)}")
    return options


def _set_logprobs(options: inference_pb2.GenerationOptions, given: Json) -> None:
    """A number in completions, a switch and a number in chats."""
    wanted, top = given.pop("logprobs", None), given.pop("top_logprobs", 0)
    if wanted is True:
        options.logprobs = top
    elif isinstance(wanted, int) and wanted is not False:
        options.logprobs = wanted


def _constraint(given: Json) -> inference_pb2.StructuredOutput | None:
    if "guided_regex" in given:
        return inference_pb2.StructuredOutput(regex=given.pop("guided_regex"))
    if "guided_grammar" in given:
        return inference_pb2.StructuredOutput(grammar=given.pop("guided_grammar"))
    if "guided_choice" in given:
        choices = inference_pb2.StructuredOutput.Choices(texts=given.pop("guided_choice"))
        return inference_pb2.StructuredOutput(choice=choices)
    format_ = given.pop("response_format", None)
    if format_ is None:
        return None
    if format_["type"] == "json_object":
        return inference_pb2.StructuredOutput(json_object=True)
    wanted = format_["json_schema"]
    return inference_pb2.StructuredOutput(json_schema=json.dumps(wanted["schema"]), strict=wanted.get("strict", True))
