"""Asks a gateway by each of its APIs. What is asked is given as the HTTP body; what comes back is an `Outcome`."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
import httpx

from common.pb.tandem.v1 import inference_pb2 as pb
from common.pb.tandem.v1 import inference_pb2_grpc
from tests.e2e.cluster import PATIENCE, Cluster
from tests.factories.http import NO_TLS
from tests.parity.features import Feature
from tests.parity.outcome import Call, Choice, Outcome, Scored

#: Called at each piece of an answer.
OnPiece = Callable[[], None]
Ask = Callable[[Cluster, str, Feature, dict[str, Any], OnPiece], Outcome]

_FINISH = {0: None, 1: "stop", 2: "length", 3: "tool_calls"}
#: Options whose name and form are the same in the HTTP body and in the proto.
_PLAIN_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "n",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt", "include_stop_str_in_output",
    "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


def ask_http(cluster: Cluster, gateway: str, feature: Feature, body: dict[str, Any], on_piece: OnPiece) -> Outcome:
    url = f"{cluster.url_of(gateway)}/v1/{feature.path}"
    answer = httpx.post(url, json=body, trust_env=False, verify=NO_TLS, timeout=PATIENCE * 3)
    assert answer.status_code == httpx.codes.OK, answer.text
    whole = answer.json()
    outcome = Outcome.empty(len(whole["choices"]))
    for given in whole["choices"]:
        choice = outcome.choices[given["index"]]
        _add_piece(choice, given.get("message") or {"content": given["text"]})
        choice.scores += _http_scores(given["logprobs"])
        choice.finish_reason, choice.stop_reason = given["finish_reason"], given.get("stop_reason")
        outcome.prompt_scores = _prompt_scores(given.get("prompt_logprobs"))
    _set_usage(outcome, whole["usage"])
    return outcome


def ask_sse(cluster: Cluster, gateway: str, feature: Feature, body: dict[str, Any], on_piece: OnPiece) -> Outcome:
    url = f"{cluster.url_of(gateway)}/v1/{feature.path}"
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    outcome = Outcome.empty(feature.num_choices)
    with httpx.stream("POST", url, json=streamed, trust_env=False, verify=NO_TLS, timeout=PATIENCE * 3) as answer:
        assert answer.status_code == httpx.codes.OK, answer.read()
        events = list(_events(answer.iter_lines(), on_piece))
    assert events.pop() == "[DONE]"
    for event in events:
        for given in event["choices"]:
            choice = outcome.choices[given["index"]]
            assert choice.finish_reason is None, f"more after the end: {given}"
            _add_piece(choice, given.get("delta") or {"content": given.get("text")})
            choice.scores += _http_scores(given["logprobs"])
            choice.finish_reason, choice.stop_reason = given["finish_reason"], given.get("stop_reason")
    _set_usage(outcome, events[-1]["usage"])
    return outcome


def ask_grpc(cluster: Cluster, gateway: str, feature: Feature, body: dict[str, Any], on_piece: OnPiece) -> Outcome:
    outcome = Outcome.empty(feature.num_choices)
    with grpc.insecure_channel(cluster.grpc_target_of(gateway)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Chat(_chat(body), timeout=PATIENCE * 3) if "messages" in body else stub.Generate(_generate(body))
        for response in call:
            on_piece()
            _add_response(outcome, response)
    return outcome


EDGES: Mapping[str, Ask] = {"http": ask_http, "sse": ask_sse, "grpc": ask_grpc}


def _events(lines: Iterator[str], on_piece: OnPiece) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            on_piece()
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def _add_piece(choice: Choice, piece: Mapping[str, Any]) -> None:
    choice.text += piece.get("content") or ""
    choice.reasoning += piece.get("reasoning_content") or ""
    for position, call in enumerate(piece.get("tool_calls") or ()):
        index = call.get("index", position)
        if index == len(choice.calls):
            choice.calls.append(Call())
        choice.calls[index].name += call["function"].get("name") or ""
        choice.calls[index].arguments += call["function"].get("arguments") or ""


def _http_scores(logprobs: Mapping[str, Any] | None) -> list[Scored]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            Scored(entry["token"], entry["logprob"], _with_chosen(entry["token"], entry["logprob"], entry))
            for entry in logprobs["content"]
        ]
    columns = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [Scored(token, logprob, top or {}) for token, logprob, top in columns]


def _with_chosen(token: str, logprob: float, entry: Mapping[str, Any]) -> dict[str, float]:
    return {other["token"]: other["logprob"] for other in entry["top_logprobs"]} | {token: logprob}


def _prompt_scores(entries: list[Any] | None) -> list[Scored]:
    """vLLM's form: by token id, the prompt's own token first."""
    scores = []
    for entry in (entries or [])[1:]:
        by_text = {candidate["decoded_token"]: candidate["logprob"] for candidate in entry.values()}
        chosen = next(iter(entry.values()))
        scores.append(Scored(chosen["decoded_token"], chosen["logprob"], by_text))
    return scores


def _set_usage(outcome: Outcome, usage: Mapping[str, Any]) -> None:
    outcome.prompt_tokens = usage["prompt_tokens"]
    outcome.completion_tokens = usage["completion_tokens"]
    outcome.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["total_tokens"] == outcome.prompt_tokens + outcome.completion_tokens


# --- gRPC --------------------------------------------------------------------------------------------


def _generate(body: Mapping[str, Any]) -> pb.GenerateRequest:
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return pb.GenerateRequest(model=body["model"], text=prompt, options=_options(body))
    return pb.GenerateRequest(model=body["model"], token_ids=pb.TokenIds(ids=prompt), options=_options(body))


def _chat(body: Mapping[str, Any]) -> pb.ChatRequest:
    request = pb.ChatRequest(
        model=body["model"],
        messages=[_message(message) for message in body["messages"]],
        options=_options(body),
        tools=[_tool(tool["function"]) for tool in body.get("tools", ())],
    )
    for name in ("parallel_tool_calls", "add_generation_prompt", "continue_final_message"):
        if name in body:
            setattr(request, name, body[name])
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        request.tool_choice.function = choice["function"]["name"]
    elif choice is not None:
        request.tool_choice.mode = getattr(pb.ToolChoice, f"MODE_{choice.upper()}")
    return request


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [
        pb.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    call_id = message.get("tool_call_id", "")
    return pb.ChatMessage(role=message["role"], content=content, tool_calls=calls, tool_call_id=call_id)


def _tool(function: Mapping[str, Any]) -> pb.Tool:
    parameters = json.dumps(function["parameters"])
    return pb.Tool(name=function["name"], description=function.get("description", ""), parameters=parameters)


def _options(body: Mapping[str, Any]) -> pb.GenerationOptions:
    options = pb.GenerationOptions(**{name: body[name] for name in _PLAIN_OPTIONS if name in body})
    options.logit_bias.update({int(token): bias for token, bias in body.get("logit_bias", {}).items()})
    stop = body.get("stop", [])
    options.stop.extend([stop] if isinstance(stop, str) else stop)
    logprobs = body.get("top_logprobs") if body.get("logprobs") is True else body.get("logprobs")
    if logprobs is not None:
        options.logprobs = logprobs
    _set_structure(options.structured_output, body)
    return options


def _set_structure(output: pb.StructuredOutput, body: Mapping[str, Any]) -> None:
    format_ = body.get("response_format", {})
    if format_.get("type") == "json_object":
        output.json_object = True
    elif format_.get("type") == "json_schema":
        output.json_schema = json.dumps(format_["json_schema"]["schema"])
        output.strict = format_["json_schema"]["strict"]
    wanted = body.get("structured_outputs", {})
    if "regex" in wanted:
        output.regex = wanted["regex"]
    if "grammar" in wanted:
        output.grammar = wanted["grammar"]
    if "choice" in wanted:
        output.choice.texts.extend(wanted["choice"])


def _add_response(outcome: Outcome, response: pb.GenerateResponse) -> None:
    event = response.WhichOneof("event")
    if event == "summary":
        outcome.prompt_tokens = response.summary.prompt_tokens
        outcome.completion_tokens = response.summary.completion_tokens
        outcome.cached_tokens = response.summary.cached_tokens
    elif event == "prompt":
        outcome.prompt_scores = [
            *(outcome.prompt_scores or ()),
            *(_grpc_score(entry) for entry in response.prompt.logprobs),
        ]
    else:
        _add_delta(outcome.choices[response.delta.choice], response.delta)


def _add_delta(choice: Choice, delta: pb.TextDelta) -> None:
    assert choice.finish_reason is None, f"more after the end: {delta}"
    choice.text += delta.text
    choice.reasoning += delta.reasoning
    for call in delta.tool_calls:
        if call.index == len(choice.calls):
            choice.calls.append(Call())
        choice.calls[call.index].name += call.name
        choice.calls[call.index].arguments += call.arguments
    choice.scores += [_grpc_score(entry) for entry in delta.logprobs]
    choice.finish_reason = _FINISH[delta.finish_reason]
    if (kind := delta.WhichOneof("stop_reason")) is not None:
        choice.stop_reason = getattr(delta, kind)


def _grpc_score(entry: pb.TextLogprobs) -> Scored:
    top = {candidate.text: candidate.logprob for candidate in (*entry.top, entry.chosen)}
    return Scored(entry.chosen.text, entry.chosen.logprob, top)
