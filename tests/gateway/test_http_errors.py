"""Whatever a client gets wrong is a 4xx with OpenAI's error body that names the field, never a 5xx."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    TandemError,
    Unauthenticated,
)
from gateway.http.limits import MAX_BIASES
from gateway.http.schemas import CompletionBody
from gateway.http.services import HttpOptions
from gateway.serving import ServingModel
from tests.factories.http import NO_TLS
from tests.gateway.edges import Edge, running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, answers

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, "fine"))


@pytest.fixture
async def edge(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[Edge]:
    async with running_http(model, dispatcher, options=HttpOptions(max_body_bytes=20_000, body_timeout=0.3)) as running:
        yield running


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as client:
        yield client
        assert (await client.get("/health")).status_code == 200
        control = await client.post(TEXT, json={"prompt": "x"})
        assert control.json()["choices"][0]["text"] == "fine"


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    return error


CHAT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["bare"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "blob", "x": 1}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": HI, "temperature": "hot"}, "temperature"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "max_tokens": 4.5}, "max_tokens"),
    ({"messages": HI, "max_tokens": True}, "max_tokens"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "logit_bias": {"191222": -100, "5": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"401": 5}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"-1": 5}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"abc": 5}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"9" * 5000: 5}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"messages": HI, "stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": HI, "stream": "yes"}, "stream"),
    ({"messages": HI, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"messages": HI, "tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "response_format": {"type": "yaml"}}, "response_format.type"),
    ({"messages": HI, "guided_choice": []}, "guided_choice"),
    ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
    ({"messages": HI, "chat_template_kwargs": {"messages": "boom"}}, "chat_template_kwargs"),
    ({"messages": HI, "cache_salt": ""}, "cache_salt"),
    ({"messages": HI, "cache_salt": 5}, "cache_salt"),
    ({"messages": [{"role": "user", "content": "x " * 2000}]}, "messages"),
    ({"messages": HI, "model": 5}, "model"),
]
TEXT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt[1]"),
    ({"prompt": [[5], [6, "a"]]}, "prompt[1][1]"),
    ({"prompt": [5, 401]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": [5] * 256}, "prompt"),
    ({"prompt": "hi", "temperature": -0.5}, "temperature"),
    ({"prompt": "hi", "temperature": 999999.0, "top_p": -1.0}, "temperature"),
    ({"prompt": "hi", "top_p": 1.5}, "top_p"),
    ({"prompt": "hi", "min_p": -0.1}, "min_p"),
    ({"prompt": "hi", "presence_penalty": 5}, "presence_penalty"),
    ({"prompt": "hi", "frequency_penalty": -5}, "frequency_penalty"),
    ({"prompt": "hi", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "hi", "top_k": -5}, "top_k"),
    ({"prompt": "hi", "top_k": 2**40}, "top_k"),
    ({"prompt": "hi", "seed": 2**64}, "seed"),
    ({"prompt": "hi", "n": 0}, "n"),
    ({"prompt": "hi", "n": -1}, "n"),
    ({"prompt": "hi", "n": 100000, "best_of": 100000}, "n"),
    ({"prompt": "hi", "n": 3, "best_of": 2}, "best_of"),
    ({"prompt": "hi", "best_of": 0}, "best_of"),
    ({"prompt": "hi", "best_of": 129}, "best_of"),
    ({"prompt": "hi", "best_of": 2.0}, "best_of"),
    ({"prompt": "hi", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": ["hi"] * 1000, "best_of": 2, "stream": False}, "prompt"),
    ({"prompt": "hi", "max_tokens": 2147483648}, "max_tokens"),
    ({"prompt": "hi", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "hi", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "hi", "max_tokens": 5, "min_tokens": 10}, "min_tokens"),
    ({"prompt": "hi", "logprobs": 100000}, "logprobs"),
    ({"prompt": "hi", "logprobs": True}, "logprobs"),
    ({"prompt": "hi", "logprobs": 21}, "logprobs"),
    ({"prompt": "hi", "echo": True, "logprobs": -1}, "logprobs"),
    ({"prompt": "hi", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ({"prompt": "hi", "suffix": "x"}, "suffix"),
    ({"prompt": "hi", "stop": ""}, "stop"),
    ({"prompt": "hi", "stop": 5}, "stop"),
    ({"prompt": "hi", "stop": ["a", 5]}, "stop[1]"),
    ({"prompt": "hi", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "hi", "stop": "a" * 1025}, "stop"),
    ({"prompt": "hi", "stop_token_ids": [401]}, "stop_token_ids"),
    ({"prompt": "hi", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "hi", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "hi", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "hi", "prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt": "hi", "priority": 2**31}, "priority"),
    ({"prompt": "hi", "priority": 1.5}, "priority"),
    ({"prompt": "hi", "priority": "high"}, "priority"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_mistake_is_named(client: httpx.AsyncClient, dispatcher: FakeDispatcher, stream: bool) -> None:
    cases = [(CHAT, *mistake) for mistake in CHAT_MISTAKES] + [(TEXT, *mistake) for mistake in TEXT_MISTAKES]
    for path, body, param in cases:
        response = await client.post(path, json={"stream": stream} | body)
        assert response.status_code == 400, (body, response.text)
        error = error_of(response)
        assert error["param"] == param, (body, error)
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 300
    assert dispatcher.requests == []


MALFORMED: list[tuple[str | bytes, str | None]] = [
    ("not json", None),
    ("", None),
    ("[]", None),
    ("5", None),
    ("null", None),
    ('{"prompt": "hi", "temperature": NaN}', "temperature"),
    ('{"prompt": "hi", "top_p": Infinity}', "top_p"),
    ('{"prompt": "hi", "temperature": 1e999}', "temperature"),
    ('{"prompt": "hi", "temperature": %s}' % ("9" * 400), "temperature"),
    ('{"prompt": "hi", "seed": %s}' % ("9" * 5000), None),
    ('{"prompt": "\\ud800"}', None),
    ('{"a":' * 2000 + "1" + "}" * 2000, None),
    (b'{"prompt": "\xff\xfe"}', None),
]


async def test_malformed_bodies(client: httpx.AsyncClient) -> None:
    for raw, param in MALFORMED:
        for path in (TEXT, CHAT):
            response = await client.post(path, content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 400, (raw[:50], response.text)
            error = error_of(response)
            assert error["param"] == param or param is None or path == CHAT


async def test_context_length_code(client: httpx.AsyncClient) -> None:
    for body in ({"prompt": [5] * 300}, {"prompt": "one " * 4000}, {"prompt": "hi", "max_tokens": 10_000}):
        response = await client.post(TEXT, json=body)
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")


async def test_unknown_model_path_and_method(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"model": "no-such-model", "messages": HI})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "no-such-model" in error["message"]
    response = await client.get(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    error_of(response)
    response = await client.post("/v1/nope", json={})
    assert response.status_code == 404
    error_of(response)


async def test_media_type(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, content='{"prompt":"x"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415
    error_of(response)
    response = await client.post(TEXT, content='{"prompt":"x"}')
    assert response.status_code == 200


async def test_encoded_bodies_are_refused(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await client.post(TEXT, content=gzip.compress(b'{"prompt":"x"}'), headers=headers)
    assert response.status_code == 415
    error_of(response)
    plain = await client.post(TEXT, json={"prompt": "x"}, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


async def test_a_slash_too_many_is_an_unknown_path(client: httpx.AsyncClient) -> None:
    response = await client.post(f"{TEXT}/", json={"prompt": "x"})
    assert response.status_code == 404
    assert error_of(response)["code"] == "unknown_url"


def test_too_many_biases() -> None:
    body = {"prompt": "x", "logit_bias": {str(i): 0.0 for i in range(MAX_BIASES + 1)}}
    with pytest.raises(ValidationError, match="logit_bias"):
        CompletionBody.model_validate(body)


async def test_body_limit_with_and_without_length(client: httpx.AsyncClient, edge: Edge) -> None:
    big = json.dumps({"prompt": "x" * 30_000})
    response = await client.post(TEXT, content=big, headers={"content-type": "application/json"})
    assert (response.status_code, error_of(response)["code"]) == (413, "payload_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"x" * 1000

    sent = await client.post(TEXT, content=chunks(), headers={"content-type": "application/json"})
    assert sent.status_code == 413
    # A declared length is refused before the body is there.
    reader, writer = await asyncio.open_connection(edge.host, edge.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
    assert b" 413 " in await reader.readline()
    writer.close()


async def test_slow_body_ends_by_a_timeout(client: httpx.AsyncClient, edge: Edge) -> None:
    reader, writer = await asyncio.open_connection(edge.host, edge.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{")
    assert b" 408 " in await reader.readline()
    writer.close()


REFUSALS: list[tuple[TandemError, int, str, str | None]] = [
    (InvalidRequest("no", field="prompt"), 400, "invalid_request_error", None),
    (Unauthenticated("no"), 401, "authentication_error", None),
    (PayloadTooLarge("no"), 413, "invalid_request_error", None),
    (RateLimited("no", retry_after=1.2), 429, "rate_limit_error", "2"),
    (Overloaded("no", retry_after=0.1), 503, "service_unavailable_error", "1"),
    (NoWorker("no"), 503, "service_unavailable_error", "1"),
    (DeadlineExceeded("no"), 504, "timeout_error", None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_dispatcher_errors_by_the_table(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, stream: bool
) -> None:
    for refusal, status, type_, retry in REFUSALS:
        dispatcher.refusal = lambda request, refusal=refusal: refusal  # type: ignore[misc]
        response = await client.post(TEXT, json={"prompt": ["a", "b"], "stream": stream})
        error = error_of(response)
        assert (response.status_code, error["type"], error["message"]) == (status, type_, "no")
        assert response.headers.get("retry-after") == retry
    dispatcher.refusal = lambda request: None


async def test_one_refused_prompt_closes_the_others(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.refusal = lambda request: Overloaded("full") if request.request_id.endswith("-1") else None
    response = await client.post(TEXT, json={"prompt": ["a", "b", "c"]})
    assert response.status_code == 503
    assert dispatcher.all_closed
    dispatcher.refusal = lambda request: None


async def test_bug_is_a_500_without_details(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.refusal = lambda request: RuntimeError("secret detail")
    response = await client.post(TEXT, json={"prompt": "a"})
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "secret" not in response.text
    dispatcher.refusal = lambda request: None


async def test_harmless_unknown_fields_are_ignored(client: httpx.AsyncClient) -> None:
    extra = {"metadata": {"a": "b"}, "store": False, "tools": [], "tool_choice": "none", "response_format": None}
    body = {"messages": HI, "user": "u", "parallel_tool_calls": True, "response_format": {"type": "text"}}
    for variant in (extra, body):
        assert (await client.post(CHAT, json={"messages": HI} | variant)).status_code == 200


async def test_content_parts_and_roles(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    parts = [{"type": "text", "text": "Name three "}, {"type": "text", "text": "fruits."}]
    for content in ("Name three fruits.", parts):
        await client.post(CHAT, json={"messages": [{"role": "user", "content": content, "name": "Ann"}]})
    for role in ("system", "developer"):
        await client.post(CHAT, json={"messages": [{"role": role, "content": "Be brief."}, *HI]})
    prompts = [request.prompt_ids for request in dispatcher.requests]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]


async def test_extreme_but_valid_values(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    for extra in (
        {"temperature": 1e-30},
        {"top_p": 0},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"seed": -(2**63)},
        {"logit_bias": {"400": -100}},
        {"max_tokens": None, "stop": None, "n": None, "logprobs": None, "stream": None, "seed": None},
        {"stop": []},
    ):
        response = await client.post(TEXT, json={"prompt": "x"} | extra)
        assert response.status_code == 200, response.text
    params = [request.params for request in dispatcher.requests]
    assert params[0].greedy and params[1].greedy
    assert (params[2].top_k, params[3].top_k, params[4].seed) == (0, 401, 2**63)


async def test_model_without_template(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, template=None)
    dispatcher = FakeDispatcher(answers(model.tokenizer, "fine"))
    async with running_http(model, dispatcher) as edge, httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as client:
        response = await client.post(CHAT, json={"messages": HI})
        assert (response.status_code, error_of(response)["param"]) == (400, "messages")
        assert (await client.post(TEXT, json={"prompt": "x"})).status_code == 200


async def test_raising_template(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    async with (
        running_http(model, FakeDispatcher(answers(model.tokenizer, "fine"))) as edge,
        httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as client,
    ):
        response = await client.post(CHAT, json={"messages": HI})
    assert response.status_code == 400
    assert "roles must alternate" in error_of(response)["message"]
