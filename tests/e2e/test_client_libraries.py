"""Client libraries as people use them, unmodified: helpers of openai-python, langchain-openai and litellm.

The model writes nonsense, so what it must write is forced: by a schema, or by a tool that has to be called.
"""

import asyncio
from typing import Any, Literal

import litellm
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from tests.e2e.cluster import PATIENCE, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "test-model"
QUESTION = "Tell me of a cat."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class Cat(BaseModel):
    """A cat."""

    name: str = Field(max_length=8)
    kind: Literal["house", "wild"]
    lives: int = Field(ge=0, le=9)


class GetTime(BaseModel):
    """The time of day in a city."""

    city: Literal["Paris", "Rome"]


@tool
def get_time(city: Literal["Paris", "Rome"]) -> str:
    """The time of day in a city."""
    return f"ten in {city}"


class TestOpenAI:
    """Beyond plain `create`, which has tests of its own."""

    def test_parse(self, client: openai.OpenAI) -> None:
        answer = client.beta.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Cat, temperature=1, seed=1, n=2, max_tokens=120
        )
        assert len(answer.choices) == 2
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Cat)

    def test_parse_tools(self, client: openai.OpenAI) -> None:
        answer = client.beta.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            tools=[openai.pydantic_function_tool(GetTime)],
            tool_choice="required",
            temperature=0,
            max_tokens=200,
        )
        calls = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and calls
        assert all(isinstance(call.function.parsed_arguments, GetTime) for call in calls)

    def test_stream_helper(self, client: openai.OpenAI) -> None:
        with client.beta.chat.completions.stream(
            model=MODEL, messages=MESSAGES, response_format=Cat, temperature=0, max_tokens=120
        ) as stream:
            events = list(stream)
        final = stream.get_final_completion().choices[0].message
        assert isinstance(final.parsed, Cat)
        assert "".join(event.delta for event in events if event.type == "content.delta") == final.content
        assert events[-1].type == "content.done" or any(event.type == "content.done" for event in events)

    def test_stream_helper_with_tools(self, client: openai.OpenAI) -> None:
        with client.beta.chat.completions.stream(
            model=MODEL,
            messages=MESSAGES,
            tools=[openai.pydantic_function_tool(GetTime)],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
        ) as stream:
            events = list(stream)
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        assert [(event.name, event.arguments) for event in done] == [("GetTime", call.function.arguments)]
        assert isinstance(call.function.parsed_arguments, GetTime)

    async def test_async(self, served: Cluster) -> None:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:

            async def ask(seed: int) -> tuple[str, str]:
                asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": seed, "max_tokens": 12}
                whole = await client.chat.completions.create(**asked)
                pieces = [
                    chunk.choices[0].delta.content or ""
                    async for chunk in await client.chat.completions.create(**asked, stream=True)
                ]
                return whole.choices[0].message.content or "", "".join(pieces)

            for whole, streamed in await asyncio.gather(*(ask(seed) for seed in range(4))):
                assert whole == streamed

    def test_responses(self, client: openai.OpenAI) -> None:
        answer = client.responses.parse(
            model=MODEL, input=QUESTION, text_format=Cat, temperature=0, max_output_tokens=120
        )
        assert isinstance(answer.output_parsed, Cat)
        assert client.responses.retrieve(answer.id).output_text == answer.output_text
        more = client.responses.create(
            model=MODEL, input="And of another.", previous_response_id=answer.id, max_output_tokens=4
        )
        assert more.usage is not None and answer.usage is not None
        assert more.usage.input_tokens > answer.usage.input_tokens

    def test_responses_stream(self, client: openai.OpenAI) -> None:
        # The helper knows no final response but a completed one, so the answer is made to end.
        with client.responses.stream(
            model=MODEL, input=QUESTION, text_format=Cat, temperature=0, max_output_tokens=120
        ) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert final.output_text == text
        assert isinstance(final.output_parsed, Cat)
        assert final.status == "completed"


class TestLangChain:
    @pytest.fixture
    def model(self, served: Cluster) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",  # type: ignore[arg-type]
            model=MODEL,
            temperature=0,
            max_tokens=160,  # type: ignore[call-arg]
            max_retries=0,
        )

    def test_invoke_and_stream(self, model: ChatOpenAI) -> None:
        answer = model.invoke([HumanMessage(QUESTION)])
        assert isinstance(answer, AIMessage) and answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] > 0
        assert "".join(str(chunk.content) for chunk in model.stream(QUESTION)) == answer.content

    async def test_batch(self, model: ChatOpenAI) -> None:
        answers = await model.abatch(["one", "two", "three"])
        assert [answer.content for answer in answers] == [
            model.invoke(word).content for word in ("one", "two", "three")
        ]

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, model: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
        assert isinstance(model.with_structured_output(Cat, method=method).invoke(QUESTION), Cat)

    def test_a_tool_and_its_answer(self, model: ChatOpenAI) -> None:
        caller = model.bind_tools([get_time], tool_choice="get_time", parallel_tool_calls=False)
        question = HumanMessage("What time is it in Paris?")
        asked = caller.invoke([question])
        assert isinstance(asked, AIMessage)
        (call,) = asked.tool_calls
        assert call["name"] == "get_time" and call["args"]["city"] in ("Paris", "Rome")
        result = ToolMessage(get_time.invoke(call["args"]), tool_call_id=str(call["id"]))
        assert isinstance(model.bind_tools([get_time]).invoke([question, asked, result]), AIMessage)

    def test_completion(self, served: Cluster) -> None:
        model = OpenAI(base_url=f"{served.url}/v1", api_key="none", model=MODEL, max_tokens=8)  # type: ignore[arg-type]
        assert isinstance(model.invoke("one two three"), str)


# Its own models make pydantic warn where they are first used.
@pytest.mark.filterwarnings("ignore::UserWarning")
class TestLiteLLM:
    @pytest.fixture
    def asked(self, served: Cluster) -> dict[str, Any]:
        return {
            "model": f"openai/{MODEL}",
            "api_base": f"{served.url}/v1",
            "api_key": "none",
            "messages": MESSAGES,
            "temperature": 0,
            "max_tokens": 160,
            "num_retries": 0,
        }

    def test_completion_and_stream(self, asked: dict[str, Any]) -> None:
        whole = litellm.completion(**asked)
        assert whole.usage.completion_tokens > 0
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
        assert "".join(pieces) == whole.choices[0].message.content

    def test_schema(self, asked: dict[str, Any]) -> None:
        answer = litellm.completion(**asked, response_format=Cat)
        Cat.model_validate_json(answer.choices[0].message.content)

    def test_tools(self, asked: dict[str, Any]) -> None:
        answer = litellm.completion(**asked, tools=[openai.pydantic_function_tool(GetTime)], tool_choice="required")
        calls = answer.choices[0].message.tool_calls
        assert calls
        for call in calls:
            GetTime.model_validate_json(call.function.arguments)

    def test_errors_are_what_the_library_knows(self, asked: dict[str, Any]) -> None:
        with pytest.raises(litellm.BadRequestError):
            litellm.completion(**{**asked, "temperature": 9})
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(**{**asked, "model": "openai/nobody"})
