"""Tools and thoughts through the official client: items, events, and the way back of a call's result."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from gateway.generation import GenerationRequest
from gateway.serving import ServingModel
from tests.common.text.model_folders import byte_level_folder
from tests.factories.http import NO_TLS
from tests.gateway.edges import Edge, running_http
from tests.gateway.fakes import FakeDispatcher, Script, answers

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "name": "weather", "description": "Now.", "parameters": PARAMETERS, "strict": False}
CHAT_TOOL = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
THOUGHT = "<think>\nhm, hm\n</think>\n\n"
FULL = THOUGHT + "I look." + CALL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    folder: Path = byte_level_folder(tmp_path_factory.mktemp("tiny"))
    return ServingModel.load(folder, "tiny", tool_parser="hermes", reasoning_parser="think")


class Says:
    """What the model says next; may be changed between requests."""

    def __init__(self, model: ServingModel) -> None:
        self._model = model
        self.text = FULL
        self.per_delta = 1

    def __call__(self, request: GenerationRequest) -> Script:
        return answers(self._model.tokenizer, self.text, per_delta=self.per_delta)(request)


@pytest.fixture
def says(model: ServingModel) -> Says:
    return Says(model)


@pytest.fixture
def dispatcher(says: Says) -> FakeDispatcher:
    return FakeDispatcher(says, max_request_tokens=4000)


@pytest.fixture
async def edge(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[Edge]:
    async with running_http(model, dispatcher) as edge:
        yield edge


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def outline(response: Response) -> list[tuple[str, str]]:
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments))
        else:
            assert item.type in ("message", "reasoning")
            found.append((item.type, "".join(part.text for part in item.content or ())))  # type: ignore[union-attr,misc]
    return found


@pytest.mark.parametrize("per_delta", [1, 4, 1000])
async def test_thoughts_words_and_a_call(client: openai.AsyncOpenAI, says: Says, per_delta: int) -> None:
    says.per_delta = per_delta
    reply = await client.responses.create(model="tiny", input="hi", tools=[TOOL])
    kinds = outline(reply)
    assert [kind for kind, _ in kinds] == ["reasoning", "message", "weather"]
    assert (kinds[0][1], kinds[1][1], json.loads(kinds[2][1])) == ("hm, hm", "I look.", {"city": "Ulm"})
    assert reply.usage is not None
    thoughts = reply.usage.output_tokens_details.reasoning_tokens
    assert 0 < thoughts < reply.usage.output_tokens
    assert reply.status == "completed"
    assert {item.status for item in reply.output} == {"completed"}  # type: ignore[union-attr]
    async with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert outline(final) == kinds
    assert final.usage == reply.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = {"response.reasoning_text.done": "hm, hm", "response.output_text.done": "I look."}
    for event in events:
        type(event).model_validate(event.to_dict(warnings=False))
        if event.type in whole:
            assert event.text == whole.pop(event.type)  # type: ignore[union-attr]
        if event.type == "response.function_call_arguments.done":
            assert (event.name, event.arguments) == kinds[2]
    assert not whole
    stored = await client.responses.retrieve(final.id)
    assert outline(stored) == kinds
    assert [item.id for item in stored.output] == [item.id for item in final.output]


async def test_the_result_of_a_call_goes_back(
    client: openai.AsyncOpenAI, edge: Edge, says: Says, dispatcher: FakeDispatcher
) -> None:
    """By id and by hand, and both are the prompt that chat completions make of the same conversation."""
    first = await client.responses.create(model="tiny", input="hi", tools=[TOOL], instructions="Be brief.")
    call = first.output[-1]
    assert call.type == "function_call"
    says.text = "Sunny."
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    await client.responses.create(
        model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL], instructions="Be brief."
    )
    by_hand: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        *(item.to_dict() for item in first.output),
        result,
    ]
    await client.responses.create(model="tiny", input=by_hand, tools=[TOOL])
    function = {"name": "weather", "arguments": call.arguments}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm, hm",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "sun"},
    ]
    async with httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as plain:
        body = {"messages": messages, "tools": [CHAT_TOOL]}
        assert (await plain.post("/v1/chat/completions", json=body)).status_code == 200
    _, by_id, by_items, by_chat = (request.prompt_ids for request in dispatcher.requests)
    assert by_id == by_items == by_chat


async def test_several_calls(client: openai.AsyncOpenAI, says: Says) -> None:
    says.text = f"{CALL}\n{CALL}"
    async with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
        final = await stream.get_final_response()
    assert [kind for kind, _ in outline(final)] == ["weather", "weather"]
    calls = [item for item in final.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2


async def test_a_call_that_is_cut_off(client: openai.AsyncOpenAI, model: ServingModel) -> None:
    limit = len(model.tokenizer.encode(FULL)) - 12
    reply = await client.responses.create(model="tiny", input="hi", tools=[TOOL], max_output_tokens=limit)
    assert reply.status == "incomplete"
    assert [item.status for item in reply.output] == ["completed", "completed", "incomplete"]  # type: ignore[union-attr]


async def test_words_that_look_like_a_call_are_words_without_tools(client: openai.AsyncOpenAI, says: Says) -> None:
    says.text = CALL
    reply = await client.responses.create(model="tiny", input="hi")
    assert outline(reply) == [("message", CALL)]


async def test_allowed_tools_are_the_ones_shown(
    client: openai.AsyncOpenAI, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    other: Any = TOOL | {"name": "calendar"}
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    reply = await client.responses.create(model="tiny", input="hi", tools=[other, TOOL], tool_choice=choice)
    await client.responses.create(model="tiny", input="hi", tools=[TOOL])
    shown, alone = (request.prompt_ids for request in dispatcher.requests)
    assert shown == alone
    assert "calendar" not in model.tokenizer.decode(shown)
    assert [tool.name for tool in reply.tools] == ["calendar", "weather"]  # type: ignore[union-attr]
    assert reply.tool_choice.type == "allowed_tools"  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_forced_calls_are_held_by_a_grammar(
    client: openai.AsyncOpenAI, dispatcher: FakeDispatcher, choice: Any
) -> None:
    await client.responses.create(model="tiny", input="hi", tools=[TOOL], tool_choice=choice)
    assert dispatcher.request.params.grammar is not None


async def test_tool_choice_none_shows_no_tools(client: openai.AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    await client.responses.create(model="tiny", input="hi", tools=[TOOL], tool_choice="none")
    await client.responses.create(model="tiny", input="hi")
    first, second = (request.prompt_ids for request in dispatcher.requests)
    assert first == second


class Weather(BaseModel):
    """Now."""

    city: str


async def test_functions_made_of_models_are_parsed(client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"]
    flat: Any = {"type": "function", **tool}
    parsed = await client.responses.parse(model="tiny", input="hi", tools=[flat])
    call = parsed.output[-1]
    assert call.type == "function_call"
    assert call.parsed_arguments == {"city": "Ulm"}


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([TOOL, TOOL], None, "tools[1].name"),
        ([TOOL | {"name": "no spaces"}], None, "tools[0].name"),
        ([TOOL | {"parameters": {"type": "array"}}], None, "tools[0].parameters"),
        ([], "required", "tool_choice"),
        ([TOOL], {"type": "function", "name": "x"}, "tool_choice"),
        (
            [TOOL | {"name": "a"}, TOOL | {"parameters": {"type": "array"}}],
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
            "tools[1].parameters",
        ),
    ],
)
async def test_complaints_name_the_fields_of_this_api(edge: Edge, tools: Any, choice: Any, param: str) -> None:
    async with httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as plain:
        response = await plain.post("/v1/responses", json={"input": "hi", "tools": tools, "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_bad_result_names_its_item(edge: Edge) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "other", "output": "x"},
    ]
    async with httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as plain:
        response = await plain.post("/v1/responses", json={"input": items, "tools": [TOOL]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[3].call_id"
