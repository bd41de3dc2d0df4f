"""Bodies within the size limit that are made to cost much, or to break what comes later."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from gateway.http import limits
from gateway.http.responses.schemas import ResponseBody
from gateway.http.schemas import ChatCompletionBody, CompletionBody
from gateway.http.tokenize import DetokenizeBody, TokenizeBody
from gateway.serving import ServingModel
from tests.factories.http import NO_TLS
from tests.gateway.chat.templates import TEMPLATES, VOCAB_SIZE, chat_model
from tests.gateway.edges import running_http
from tests.gateway.fakes import FakeDispatcher, answers

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
BODIES = [ChatCompletionBody, CompletionBody, ResponseBody, TokenizeBody, DetokenizeBody]


@pytest.fixture(scope="module", params=["qwen", "chatml"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ServingModel:
    return chat_model(tmp_path_factory.mktemp("tiny"), TEMPLATES[request.param])


@pytest.fixture
async def client(model: ServingModel) -> AsyncIterator[httpx.AsyncClient]:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "fine"), vocab_size=VOCAB_SIZE, max_request_tokens=8000)
    async with (
        running_http(model, dispatcher) as edge,
        httpx.AsyncClient(base_url=edge.url, verify=NO_TLS, timeout=60) as client,
    ):
        yield client


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Schemas inside of a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_of(argument)


def collections_of(schema: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths to every field of lists or objects with items of their own type, at any depth."""
    for name, info in schema.model_fields.items():
        text = str(info.annotation)
        if "list[" in text or "dict[str, float]" in text or "dict[str, str]" in text:
            yield (*path, name)
        for inner in models_of(info.annotation):
            yield from collections_of(inner, (*path, name))


@pytest.mark.parametrize(
    ("schema", "path"), [(schema, path) for schema in BODIES for path in sorted(set(collections_of(schema)))]
)
@pytest.mark.parametrize("wrong", [[None] * 50, {str(index): [] for index in range(50)}])
def test_one_complaint_however_many_items_are_wrong(schema: type[BaseModel], path: tuple[str, ...], wrong: Any) -> None:
    """The validator would make one for each: four million wrong messages took half a minute and 4 GB."""
    value = wrong
    for name in reversed(path[1:]):
        value = [{name: value, "type": "x"}] if path[0] in ("messages", "tools", "input") else {name: value}
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps({path[0]: value}))
    within = [error for error in caught.value.errors() if error["loc"][0] == path[0]]
    assert len(within) <= 1, within


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [HI] * (limits.MAX_MESSAGES + 1)}, "messages"),
        (
            {"messages": [HI | {"content": [{"type": "text", "text": ""}] * (limits.MAX_PARTS + 1)}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * (limits.MAX_CALLS + 1)}]}, "messages[0].tool_calls"),
        ({"messages": [HI], "unknown": [[]] * (limits.MAX_BRACKETS + 1)}, None),
    ],
)
async def test_long_lists(client: httpx.AsyncClient, body: dict[str, Any], field: str | None) -> None:
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


ARGUMENTS = [
    pytest.param('{"a": "\\ud800"}', id="half a surrogate pair"),
    pytest.param('{"\\udc00": 1}', id="half a surrogate pair in a name"),
    *(pytest.param('{"a": ' + "[" * depth + "]" * depth + "}", id=f"{depth} deep") for depth in range(150, 1000, 50)),
    pytest.param('{"a": ' + "1" * 4000 + "}", id="many digits"),
    pytest.param('{"a": ' + "1" * 5000 + "}", id="too many digits"),
    pytest.param('{"a": [NaN, -Infinity, 1e999]}', id="no numbers"),
    pytest.param('{"a": "\\u0000"}', id="NUL"),
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
async def test_arguments_of_earlier_calls_are_any_text(client: httpx.AsyncClient, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [HI, {"role": "assistant", "tool_calls": [call]}, HI], "tools": tools}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}, HI]
    response = await client.post("/v1/responses", json={"input": items})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"tools":[{"type":"function","name":"f","parameters":{"type":"object","x":[NUMBER]}}]', "tools[0].parameters"),
        (
            '"tools":[{"type":"function","name":"f"}],"tool_choice":{"type":"function","name":"f","x":NUMBER}',
            "tool_choice",
        ),
    ],
)
async def test_what_an_answer_repeats_can_be_written(
    client: httpx.AsyncClient, fields: str, param: str, number: str, stream: bool
) -> None:
    content = f'{{"input":"hi","stream":{json.dumps(stream)},{fields.replace("NUMBER", number)}}}'
    response = await client.post("/v1/responses", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_schema_under_check_holds_up_nobody(client: httpx.AsyncClient) -> None:
    """Seconds of work that only a thread may do: another request is answered meanwhile."""
    schema = {
        "allOf": [{"properties": {f"x{index}": True}} for index in range(60)],
        "unevaluatedProperties": False,
        "anyOf": [{"properties": {f"z{index}": True}} for index in range(100)],
    }
    body = {"messages": [HI], "guided_json": schema}
    checking = asyncio.ensure_future(client.post(CHAT, json=body))
    answered = 0
    while not checking.done():
        assert (await client.get("/health")).status_code == 200
        answered += not checking.done()
    assert (await checking).status_code == 400
    assert answered > 1


async def test_null_is_the_same_as_absent_for_tokenize(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokenize", json={"prompt": "a", "messages": None})).status_code == 200
    assert (await client.post("/tokenize", json={"prompt": None, "messages": [HI]})).status_code == 200


@pytest.mark.parametrize("field", ["tool_choice", "guided_json"])
async def test_a_field_of_several_types_is_named(client: httpx.AsyncClient, field: str) -> None:
    response = await client.post("/v1/responses", json={"input": "hi", field: 5})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
