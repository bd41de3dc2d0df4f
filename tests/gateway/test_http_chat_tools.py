"""Tools, thoughts and continued messages over HTTP, with the official client where it knows them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.serving import ServingModel
from tests.factories.http import NO_TLS
from tests.gateway.chat.templates import MISTRAL_MARKS, TEMPLATES, VOCAB_SIZE, chat_model
from tests.gateway.edges import Edge, running_http
from tests.gateway.fakes import FakeDispatcher, answers, deltas, token_logprobs

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TIME = {"type": "function", "function": {"name": "get_time", "description": "now"}}
TOOLS = {"messages": HI, "tools": [WEATHER, TIME]}
CALLS = (
    "Let me see.\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


class Served:
    """A model that writes what it is told, behind a real server."""

    def __init__(self, model: ServingModel, edge: Edge, dispatcher: FakeDispatcher, http: httpx.AsyncClient) -> None:
        self.model, self.edge, self.dispatcher, self.http = model, edge, dispatcher, http
        self.openai = openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0)

    def writes(self, text: str, *, per_delta: int = 1) -> None:
        self.dispatcher.script_for = answers(self.model.tokenizer, text, per_delta=per_delta)

    async def whole(self, **body: Any) -> dict[str, Any]:
        response = await self.http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    async def chunks(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, whose order of kinds must be right for each choice."""
        response = await self.http.post(CHAT, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
        chunks = [json.loads(line) for line in lines[:-1]]
        for index in {choice["index"] for chunk in chunks for choice in chunk["choices"]}:
            check_order([choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index])
        return chunks


def check_order(choices: list[dict[str, Any]]) -> None:
    """One role first, one finish last, something in every chunk between."""
    assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
    finishes = [choice["finish_reason"] for choice in choices]
    assert finishes[-1] is not None and finishes[:-1] == [None] * (len(finishes) - 1)
    assert choices[-1]["delta"] == {}
    known: set[int] = set()
    for choice in choices[1:-1]:
        assert len(choice["delta"]) == 1
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] in known:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            else:
                assert call["type"] == "function" and call["id"] and call["function"]["arguments"] == ""
                assert call["index"] == len(known)
                known.add(call["index"])


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A stream's choice as a message."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for key in ("content", "reasoning_content"):
                message[key] += choice["delta"].get(key, "")
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


@asynccontextmanager
async def serving(model: ServingModel) -> AsyncIterator[Served]:
    dispatcher = FakeDispatcher(answers(model.tokenizer, ""), vocab_size=VOCAB_SIZE, max_request_tokens=8192)
    async with running_http(model, dispatcher) as edge, httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as http:
        served = Served(model, edge, dispatcher, http)
        yield served
        await served.openai.close()
    assert dispatcher.all_closed


@pytest.fixture(scope="module")
def qwen_model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return chat_model(tmp_path_factory.mktemp("qwen"), TEMPLATES["qwen"])


@pytest.fixture
async def qwen(qwen_model: ServingModel) -> AsyncIterator[Served]:
    async with serving(qwen_model) as served:
        yield served


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return chat_model(tmp_path_factory.mktemp("thinker"), TEMPLATES["qwen thinking"])


@pytest.fixture
async def thinker(thinking_model: ServingModel) -> AsyncIterator[Served]:
    async with serving(thinking_model) as served:
        yield served


@pytest.mark.parametrize("per_delta", [1, 7, 1000])
async def test_calls_whole_and_streamed(qwen: Served, per_delta: int) -> None:
    qwen.writes(CALLS, per_delta=per_delta)
    reply = await qwen.openai.chat.completions.create(model="tiny", **TOOLS)  # type: ignore[call-overload]
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    called = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert called == [("get_weather", '{"city": "Zürich 😀"}'), ("get_time", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    chunks = await qwen.chunks(**TOOLS, stream_options={"include_usage": True})
    message = joined(chunks)
    assert message["content"] == choice.message.content
    assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == called
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] == reply.usage.completion_tokens


async def test_stream_helper_puts_calls_together(qwen: Served) -> None:
    qwen.writes(CALLS)
    async with qwen.openai.chat.completions.stream(model="tiny", **TOOLS) as stream:  # type: ignore[arg-type]
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Zürich 😀"}, {}]


async def test_message_shapes(qwen: Served) -> None:
    qwen.writes('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
    message = (await qwen.whole(**TOOLS))["choices"][0]["message"]
    assert set(message) == {"role", "content", "refusal", "tool_calls"}
    assert (message["content"], message["refusal"]) == (None, None)
    assert set(message["tool_calls"][0]) == {"id", "type", "function"}
    qwen.writes("Fine.\n")
    message = (await qwen.whole(**TOOLS))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Fine.\n", "refusal": None}
    qwen.writes("")
    assert (await qwen.whole(**TOOLS))["choices"][0]["message"]["content"] == ""


async def test_calls_that_are_cut_off_stay_cut_off(qwen: Served) -> None:
    qwen.writes(CALLS)
    choice = (await qwen.whole(**TOOLS, max_tokens=60))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_stop_strings_end_calls_too(qwen: Served) -> None:
    qwen.writes(CALLS)
    choice = (await qwen.whole(**TOOLS, stop="</tool_call>"))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Zürich 😀"}']


async def test_not_parallel(qwen: Served) -> None:
    qwen.writes(CALLS)
    choice = (await qwen.whole(**TOOLS, parallel_tool_calls=False))["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert len(joined(await qwen.chunks(**TOOLS, parallel_tool_calls=False))["tool_calls"]) == 1


async def test_each_choice_has_its_calls(qwen: Served) -> None:
    qwen.writes(CALLS)
    chunks = await qwen.chunks(**TOOLS, n=3)
    assert all(joined(chunks, index) == joined(chunks, 0) for index in range(3))
    whole = await qwen.whole(**TOOLS, n=3)
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6


@pytest.mark.parametrize("text", [CALLS, "Only words."])
async def test_log_probabilities_cover_every_token(qwen: Served, text: str) -> None:
    qwen.writes(text)
    whole = await qwen.whole(**TOOLS, logprobs=True, top_logprobs=1)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == text
    chunks = await qwen.chunks(**TOOLS, logprobs=True, top_logprobs=1)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == entries


async def test_none_shows_no_tools_and_reads_no_calls(qwen: Served) -> None:
    qwen.writes(CALLS)
    none = await qwen.whole(**TOOLS, tool_choice="none")
    plain = await qwen.whole(messages=HI)
    assert none["choices"][0]["message"] == plain["choices"][0]["message"]
    assert none["choices"][0]["message"]["content"] == CALLS
    first, second = qwen.dispatcher.requests
    assert first.prompt_ids == second.prompt_ids


@pytest.mark.parametrize(
    ("choice", "grammar", "shown"),
    [
        ("auto", False, {"get_weather", "get_time"}),
        ("required", True, {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, True, {"get_weather", "get_time"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]},
            },
            False,
            {"get_time"},
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "get_time"}}]},
            },
            True,
            {"get_time"},
        ),
    ],
)
async def test_tool_choice(qwen: Served, choice: Any, grammar: bool, shown: set[str]) -> None:
    qwen.writes("ok")
    await qwen.whole(**TOOLS, tool_choice=choice)
    request = qwen.dispatcher.request
    assert (request.params.grammar is not None) is grammar
    prompt = qwen.model.tokenizer.decode(request.prompt_ids)
    assert {name for name in ("get_weather", "get_time") if name in prompt} == shown


async def test_a_conversation_with_calls(qwen: Served) -> None:
    """Whether content is null, absent or empty, the prompt is the same and holds the call."""
    qwen.writes("ok")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "utc"}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:00"}]}
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [*HI, {"role": "assistant", "tool_calls": [call]} | content, result]
        await qwen.whole(messages=messages, tools=[TIME])
    prompts = {request.prompt_ids for request in qwen.dispatcher.requests}
    assert len(prompts) == 1
    text = qwen.model.tokenizer.decode(prompts.pop())
    assert '{"name": "get_time", "arguments": {"zone": "utc"}}' in text and "12:00" in text


async def test_refusals_and_thoughts_of_earlier_turns(thinker: Served) -> None:
    thinker.writes("ok")
    said = {"role": "assistant", "content": None, "refusal": "I will not."}
    thought = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    older = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    await thinker.whole(messages=[*HI, said, *HI, thought, *HI])
    await thinker.whole(messages=[*HI, said, *HI, older, *HI])
    first, second = (thinker.model.tokenizer.decode(request.prompt_ids) for request in thinker.dispatcher.requests)
    assert first == second
    assert "I will not." in first and "<think>\nHm.\n</think>\n\nYes." in first


async def test_thoughts(thinker: Served) -> None:
    thinker.writes("<think>\nHm, é.\n</think>\n\n" + CALLS)
    whole = await thinker.whole(**TOOLS, logprobs=True)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, é.", "Let me see.")
    assert len(message["tool_calls"]) == 2
    chunks = await thinker.chunks(**TOOLS, stream_options={"include_usage": True})
    told = joined(chunks)
    assert (told["reasoning_content"], told["content"]) == ("Hm, é.", "Let me see.")
    thoughts = len(thinker.model.tokenizer.encode("<think>\nHm, é.\n</think>"))
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - thoughts) <= 1
    kept = await thinker.whole(**TOOLS, separate_reasoning=False)
    assert kept["choices"][0]["message"]["content"] == "<think>\nHm, é.\n</think>\n\nLet me see."
    cut = await thinker.whole(messages=HI, max_tokens=8)
    assert cut["choices"][0]["message"]["content"] is None
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8
    off = await thinker.whole(messages=HI, chat_template_kwargs={"enable_thinking": False})
    assert off["choices"][0]["message"]["content"].startswith("<think>")
    assert off["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_special_marks_are_read_and_not_shown(tmp_path: Path) -> None:
    async with serving(chat_model(tmp_path, TEMPLATES["mistral"], MISTRAL_MARKS)) as served:
        tokenizer = served.model.tokenizer
        ids = tokenizer.encode('[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]', add_special_tokens=False)
        assert tokenizer.token_id("[TOOL_CALLS]") == ids[0]
        end = tokenizer.eos_id
        assert end is not None
        served.dispatcher.script_for = lambda request: deltas([*ids, end])
        choice = (await served.whole(**TOOLS))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert len(call["id"]) == 9 and call["function"] == {"name": "get_time", "arguments": "{}"}
        plain = (await served.whole(messages=HI))["choices"][0]["message"]
        assert plain["content"] == ' [{"name": "get_time", "arguments": {}}]'


async def test_continuing(qwen: Served) -> None:
    qwen.writes(" time there was")
    messages = [*HI, {"role": "assistant", "content": "OK! OK!\nOnce upon a "}]
    reply = await qwen.whole(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert reply["choices"][0]["message"]["content"] == " time there was"
    prompt = qwen.model.tokenizer.decode(qwen.dispatcher.request.prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nOK! OK!\nOnce upon a ")


async def test_prompt_log_probabilities(qwen: Served) -> None:
    qwen.writes("ok")
    submit = qwen.dispatcher.submit

    async def submit_with_scores(request: Any) -> Any:
        generation = await submit(request)
        generation.prompt_logprobs = [token_logprobs(id_, 3) for id_ in request.prompt_ids[1:]]
        return generation

    qwen.dispatcher.submit = submit_with_scores  # type: ignore[method-assign]
    whole = await qwen.whole(messages=HI, prompt_logprobs=1)
    scores = whole["prompt_logprobs"]
    assert len(scores) == whole["usage"]["prompt_tokens"] and scores[0] is None
    ids = qwen.dispatcher.requests[0].prompt_ids
    assert all(str(id_) in entry for id_, entry in zip(ids[1:], scores[1:], strict=True))
    assert "prompt_logprobs" not in await qwen.whole(messages=HI)


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


def called(**fields: Any) -> list[Any]:
    return [*HI, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"} | fields]}]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [function(name=None)]}, "tools[0].function.name"),
    ({"tools": [function(name="a b")]}, "tools[0].function.name"),
    ({"tools": [function(), function()]}, "tools[1].function.name"),
    ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [function(name=f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": 5}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools"),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function()]}},
        },
        "tool_choice.allowed_tools.tools",
    ),
    ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": called(function=None)}, "messages[1].tool_calls[0].function"),
    ({"messages": called(function={"arguments": "{}"})}, "messages[1].tool_calls[0].function.name"),
    ({"messages": called(id="", function={"name": "f"})}, "messages[1].tool_calls[0].id"),
    ({"messages": called(type="custom")}, "messages[1].tool_calls[0].type"),
    ({"messages": called(function={"name": "f", "arguments": {}})}, "messages[1].tool_calls[0].function.arguments"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": called()[1]["tool_calls"]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
    ),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {
            "messages": [*HI, {"role": "assistant", "content": "a"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
    ),
    ({"echo": True}, "echo"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]


async def test_mistakes_are_named(qwen: Served) -> None:
    for body, param in MISTAKES:
        response = await qwen.http.post(CHAT, json={"messages": HI} | body)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert error["param"] == param, (body, error)
        assert len(error["message"]) < 300
    assert qwen.dispatcher.requests == []


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, "-/-"),
        ({"reasoning_effort": "low"}, "low/-"),
        ({"reasoning_effort": "none"}, "none/False"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "mine"}}, "mine/-"),
    ],
)
async def test_effort_goes_to_the_template(tmp_path: Path, fields: dict[str, Any], seen: str) -> None:
    template = "{{ reasoning_effort|default('-') }}/{{ enable_thinking|default('-') }}{{ messages[0].content }}"
    model = chat_model(tmp_path, template)
    dispatcher = FakeDispatcher(answers(model.tokenizer, "fine"), vocab_size=VOCAB_SIZE)
    async with running_http(model, dispatcher) as edge, httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as client:
        body = {"messages": [{"role": "user", "content": "!"}], **fields}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert model.tokenizer.decode(dispatcher.request.prompt_ids) == seen + "!"
        assert (await client.post("/tokenize", json=body)).json()["tokens"] == list(dispatcher.request.prompt_ids)
