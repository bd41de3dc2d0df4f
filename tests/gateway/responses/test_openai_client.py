"""The official client, unmodified, against the Responses API."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from gateway.http.responses.memory_store import MemoryStore
from gateway.http.responses.store import ResponseStore
from gateway.serving import ServingModel
from tests.gateway.edges import running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, answers

ANSWER = " Paris, naïve 😀🎉 日本!"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, ANSWER), cached_tokens=3)


@pytest.fixture
def store() -> ResponseStore:
    return MemoryStore()


@pytest.fixture
async def client(
    model: ServingModel, dispatcher: FakeDispatcher, store: ResponseStore
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running_http(model, dispatcher, responses=store) as edge,
        openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    assert dispatcher.all_closed


def rendered(model: ServingModel, *messages: tuple[str, str]) -> list[int]:
    """Prompt ids of a plain conversation."""
    turns = [{"role": role, "content": content} for role, content in messages]
    return model.tokenizer.encode(model.template.render(turns), add_special_tokens=False)


async def test_create(client: openai.AsyncOpenAI, dispatcher: FakeDispatcher, model: ServingModel) -> None:
    reply = await client.responses.create(model="tiny", input="hi")
    assert reply.output_text == ANSWER
    assert (reply.object, reply.status, reply.model, reply.id[:5]) == ("response", "completed", "tiny", "resp_")
    assert reply.error is None and reply.incomplete_details is None
    (message,) = reply.output
    assert message.type == "message" and message.role == "assistant" and message.status == "completed"
    assert message.content[0].annotations == []  # type: ignore[union-attr]
    assert list(dispatcher.request.prompt_ids) == rendered(model, ("user", "hi"))
    usage = reply.usage
    assert usage is not None
    assert usage.input_tokens == len(dispatcher.request.prompt_ids)
    assert usage.output_tokens == len(model.tokenizer.encode(ANSWER)) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 0)
    Response.model_validate(reply.to_dict(), strict=True)


async def test_stream_helper_equals_the_stored_response(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="tiny", input="hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == ANSWER
    assert deltas[-1].snapshot == ANSWER
    assert not any("\ufffd" in event.delta for event in deltas)
    others = [event.type for event in events if event.type != "response.output_text.delta"]
    assert others == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    retrieved = await client.responses.retrieve(final.id)
    assert without_parsed(final.to_dict()) == retrieved.to_dict()


def without_parsed(response: dict[str, Any]) -> dict[str, Any]:
    """What the helper adds of its own left out."""
    for item in response["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return response


async def test_every_event_is_of_its_type(client: openai.AsyncOpenAI) -> None:
    """Fields and types of each event as the client's own models want them."""
    stream = await client.responses.create(
        model="tiny", input="hi", stream=True, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    async for event in stream:
        type(event).model_validate(event.to_dict(), strict=True)


async def test_input_tokens_are_counted_without_an_answer(
    client: openai.AsyncOpenAI, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    counted = await client.responses.input_tokens.count(model="tiny", input="hi", instructions="Be brief.")
    assert counted.input_tokens == len(rendered(model, ("system", "Be brief."), ("user", "hi")))
    assert dispatcher.requests == []


class City(BaseModel):
    name: str
    people: int


async def test_answers_as_models(client: openai.AsyncOpenAI, dispatcher: FakeDispatcher, model: ServingModel) -> None:
    """`responses.parse` and the stream helper with a class as the format."""
    dispatcher.script_for = answers(model.tokenizer, '{"name": "Ulm", "people": 3}')
    parsed = await client.responses.parse(model="tiny", input="hi", text_format=City)
    assert parsed.output_parsed == City(name="Ulm", people=3)
    async with client.responses.stream(model="tiny", input="hi", text_format=City) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == City(name="Ulm", people=3)
    assert all(request.params.grammar is not None for request in dispatcher.requests)
