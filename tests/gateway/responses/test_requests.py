"""What a body of the Responses API asks for: what reaches the dispatcher, what is shown again, what is refused."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from gateway.http.structured_fields import grammar_of_fields
from gateway.serving import ServingModel
from tests.factories.http import NO_TLS
from tests.gateway.edges import running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, answers

URL = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, "one"), max_request_tokens=2000)


@pytest.fixture
async def client(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running_http(model, dispatcher) as edge,
        httpx.AsyncClient(base_url=edge.url, verify=NO_TLS, timeout=20) as client,
    ):
        yield client


async def created(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"input": "hi"} | body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    Response.model_validate(result)
    return result


async def test_options_reach_the_dispatcher(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    await created(
        client,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        service_tier="flex",
        top_logprobs=3,
        include=["message.output_text.logprobs"],
        top_k=3,
        min_p=0.1,
        seed=-1,
        repetition_penalty=1.2,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        logit_bias={"5": -100},
        ignore_eos=True,
        min_tokens=2,
        stop_token_ids=[9],
        cache_salt="mine",
    )
    request = dispatcher.request
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 3, 0.1)
    assert (params.seed, params.max_tokens, params.min_tokens, params.logprobs) == (2**64 - 1, 7, 2, 3)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.5, -1.5, 1.2)
    assert (params.logit_bias, params.ignore_eos, params.stop_token_ids) == ({5: -100.0}, True, (9,))
    assert (request.num_choices, request.request_class.value, request.cache_salt) == (1, "batch", "mine")


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 0}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 20}, 20),
        ({"top_logprobs": 2}, 2),
        ({"top_logprobs": 0}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
async def test_logprobs(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, body: dict[str, Any], logprobs: int | None
) -> None:
    reply = await created(client, **body)
    assert dispatcher.request.params.logprobs == logprobs
    assert reply["top_logprobs"] == (logprobs or 0)


async def test_parameters_are_shown_again(client: httpx.AsyncClient) -> None:
    given = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.25,
        "top_p": 0.5,
        "tool_choice": "auto",
        "truncation": "disabled",
        "user": "u",
    }
    reply = await created(client, **given)
    assert {name: reply[name] for name in given} == given
    assert (reply["background"], reply["service_tier"], reply["text"]) == (
        False,
        "default",
        {"format": {"type": "text"}},
    )
    assert reply["reasoning"] == {"effort": None, "summary": None}


async def test_defaults_are_shown(client: httpx.AsyncClient) -> None:
    reply = await created(client)
    assert (reply["temperature"], reply["top_p"], reply["max_output_tokens"]) == (1.0, 1.0, None)
    assert (reply["tools"], reply["tool_choice"], reply["parallel_tool_calls"]) == ([], "auto", True)
    assert (reply["metadata"], reply["user"], reply["truncation"]) == ({}, None, "disabled")


@pytest.mark.parametrize(
    "body",
    [
        {"background": False},
        {"n": 1},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"stream_options": {"include_obfuscation": False}},
        {"max_tool_calls": 2},
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        {"conversation": None, "prompt": None, "previous_response_id": None, "tools": None},
        {"include": []},
        {"nobody_knows": 1},
    ],
)
async def test_accepted(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    await created(client, **body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "file_search", "vector_store_ids": []}]}, "tools[1].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ],
)
async def test_not_offered(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, body: dict[str, Any], param: str
) -> None:
    response = await client.post(URL, json={"input": "hi"} | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
    assert dispatcher.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "hi", "max_output_tokens": "5"}, "max_output_tokens"),
        ({"input": "hi", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "hi", "temperature": 3}, "temperature"),
        ({"input": "hi", "include": ["nonsense"]}, "include[0]"),
        ({"input": "hi", "metadata": {"a": 1}}, "metadata.a"),
        ({"input": "hi", "metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"input": "hi", "metadata": {"k" * 65: ""}}, "metadata"),
        ({"input": "hi", "metadata": {"k": "v" * 513}}, "metadata"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "hi", "tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"input": "hi", "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            {"input": "hi", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        (
            {
                "input": "hi",
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice.tools[0].name",
        ),
        ({"input": "x" * 100_000}, "input"),
        ({"input": [{"role": "user", "content": "x " * 3000}]}, "input"),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, body: dict[str, Any], param: str
) -> None:
    response = await client.post(URL, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert dispatcher.requests == []


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ({}, "-/-"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "low/-"),
        ({"reasoning": {"effort": "none"}}, "none/False"),
        ({"reasoning": {"effort": "high"}, "chat_template_kwargs": {"reasoning_effort": "mine"}}, "mine/-"),
        ({"reasoning": {"summary": "detailed"}}, "-/-"),
    ],
)
async def test_effort_goes_to_the_template(tmp_path: Path, body: dict[str, Any], seen: str) -> None:
    template = "{{ reasoning_effort|default('-') }}/{{ enable_thinking|default('-') }}{{ messages[0].content }}"
    model = tiny_model(tmp_path, template=template)
    dispatcher = FakeDispatcher(answers(model.tokenizer, "one"))
    async with (
        running_http(model, dispatcher) as edge,
        httpx.AsyncClient(base_url=edge.url, verify=NO_TLS, timeout=20) as client,
    ):
        reply = await created(client, input="!", **body)
    assert model.tokenizer.decode(dispatcher.request.prompt_ids) == seen + "!"
    assert reply["reasoning"]["effort"] == body.get("reasoning", {}).get("effort")


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"input": "hi", "model": "nope"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_openapi_document_describes_the_body(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schema = document["paths"][URL]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"input", "previous_response_id", "tools"} <= schema["properties"].keys()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("body", "as_chat"),
    [
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, {"structured_outputs": {"regex": "[ab]+"}}),
        ({"guided_choice": ["a", "b"]}, {"guided": {"choice": ["a", "b"]}}),
    ],
)
async def test_what_the_answer_must_match(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, body: dict[str, Any], as_chat: dict[str, Any]
) -> None:
    """The grammar is the one that the shared fields ask for."""
    reply = await created(client, **body)
    assert dispatcher.request.params.grammar == grammar_of_fields(**as_chat)
    if "text" in body:
        assert reply["text"]["format"].items() >= body["text"]["format"].items()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": SCHEMA}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
        ({"text": {"format": "json"}}, "text.format"),
    ],
)
async def test_constraints_that_are_wrong(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await client.post(URL, json={"input": "hi"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
