"""Chat over gRPC: tools, thoughts, continued messages and prompt scores, as over HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from common.pb.tandem.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from gateway.http.chat_input import chat_input
from gateway.http.schemas import ChatCompletionBody
from gateway.rpc.chat import chat_from_proto
from gateway.serving import ServingModel
from gateway.structured.output import OutputKind, StructuredOutput, grammar_of
from tests.gateway.chat.templates import TEMPLATES, VOCAB_SIZE, chat_model
from tests.gateway.edges import running_grpc
from tests.gateway.fakes import FakeDispatcher, answers, token_logprobs

Message, Tool, ToolCall, ToolChoice = (
    inference_pb2.ChatMessage,
    inference_pb2.Tool,
    inference_pb2.ToolCall,
    inference_pb2.ToolChoice,
)
WRITTEN = (
    "<think>\nHm.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "f", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
TOOLS = [Tool(name="f", description="first", parameters='{"type": "object"}', strict=True), Tool(name="g")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return chat_model(tmp_path_factory.mktemp("tiny"), TEMPLATES["qwen thinking"])


@pytest.fixture(params=[1, 9, 1000])
def dispatcher(model: ServingModel, request: pytest.FixtureRequest) -> FakeDispatcher:
    script = answers(model.tokenizer, WRITTEN, per_delta=request.param)
    return FakeDispatcher(script, vocab_size=VOCAB_SIZE, max_request_tokens=4096)


@pytest.fixture
async def stub(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with running_grpc(model, dispatcher) as (address, _), grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    assert dispatcher.all_closed


def chat(*messages: Message, **fields: Any) -> inference_pb2.ChatRequest:
    return inference_pb2.ChatRequest(messages=messages or [Message(role="user", content="hi")], **fields)


async def test_calls_and_thoughts(
    stub: inference_pb2_grpc.InferenceStub, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    options = inference_pb2.GenerationOptions(n=2, logprobs=1)
    responses = [response async for response in stub.Chat(chat(tools=TOOLS, options=options))]
    for choice in (0, 1):
        parts = [response.delta for response in responses[:-1] if response.delta.choice == choice]
        assert "".join(part.text for part in parts) == "Let me see."
        assert "".join(part.reasoning for part in parts) == "Hm."
        calls: dict[int, list[str]] = {}
        for piece in (piece for part in parts for piece in part.tool_calls):
            if piece.id:
                assert piece.index not in calls
                calls[piece.index] = [piece.name, ""]
            calls[piece.index][1] += piece.arguments
        assert calls == {0: ["f", '{"city": "Zürich"}'], 1: ["g", "{}"]}
        assert parts[-1].finish_reason == generation_pb2.FINISH_REASON_TOOL_CALLS
        ids = [id_ for part in parts for id_ in part.token_ids]
        assert ids[:-1] == model.tokenizer.encode(WRITTEN, parse_special=False)
        assert sum(len(part.logprobs) for part in parts) == len(ids)
    assert responses[-1].WhichOneof("event") == "summary"


async def test_the_same_as_over_http(model: ServingModel) -> None:
    call = ToolCall(id="call_1", name="f", arguments='{"a": 1}')
    request = chat(
        Message(role="developer", content="Be brief."),
        Message(role="user", content="hi", name="ann"),
        Message(role="assistant", tool_calls=[call], reasoning_content="Hm."),
        Message(role="tool", content="", tool_call_id="call_1"),
        Message(role="assistant", content="So"),
        tools=TOOLS,
        tool_choice=ToolChoice(function="f"),
        parallel_tool_calls=False,
        chat_template_kwargs='{"enable_thinking": false}',
        continue_final_message=True,
        add_generation_prompt=False,
        separate_reasoning=False,
    )
    function = {"name": "f", "arguments": '{"a": 1}'}
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "hi", "name": "ann"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "content": "", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "So"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "first", "parameters": {"type": "object"}, "strict": True},
            },
            {"type": "function", "function": {"name": "g"}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": True,
        "add_generation_prompt": False,
        "separate_reasoning": False,
    }
    read = ChatCompletionBody.model_validate(body)
    assert chat_from_proto(request) == chat_input(read, read.messages)
    plain = ChatCompletionBody.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    assert chat_from_proto(chat()) == chat_input(plain, plain.messages)


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        (ToolChoice(mode=ToolChoice.MODE_NONE), "none"),
        (ToolChoice(mode=ToolChoice.MODE_AUTO), "auto"),
        (ToolChoice(mode=ToolChoice.MODE_REQUIRED), "required"),
        (ToolChoice(mode=ToolChoice.MODE_UNSPECIFIED), None),
        (None, None),
    ],
)
def test_modes(choice: Any, mode: str | None) -> None:
    given = chat_from_proto(chat(tools=TOOLS, tool_choice=choice)).tool_choice
    assert (None if given is None else given.mode.value) == mode


async def test_options_reach_the_dispatcher(stub: inference_pb2_grpc.InferenceStub, dispatcher: FakeDispatcher) -> None:
    options = inference_pb2.GenerationOptions(priority=-3, max_tokens=4)
    request = chat(tools=TOOLS, tool_choice=ToolChoice(mode=ToolChoice.MODE_REQUIRED), options=options)
    _ = [response async for response in stub.Chat(request)]
    assert dispatcher.request.priority == -3
    grammar = dispatcher.request.params.grammar
    assert grammar is not None and json.loads(grammar.source)["type"] == "structural_tag"


async def test_structured_output(stub: inference_pb2_grpc.InferenceStub, dispatcher: FakeDispatcher) -> None:
    output = inference_pb2.StructuredOutput(regex="[ab]+")
    request = chat(
        options=inference_pb2.GenerationOptions(structured_output=output, max_tokens=4),
        chat_template_kwargs='{"enable_thinking": false}',
    )
    _ = [response async for response in stub.Chat(request)]
    expected = grammar_of(StructuredOutput(OutputKind.REGEX, "[ab]+"), field="structured_output")
    assert dispatcher.request.params.grammar == expected


async def test_stop_strings_and_special_tokens_can_be_shown(
    stub: inference_pb2_grpc.InferenceStub, dispatcher: FakeDispatcher
) -> None:
    async def text(**options: Any) -> str:
        request = chat(options=inference_pb2.GenerationOptions(**options))
        return "".join([response.delta.text async for response in stub.Chat(request)])

    assert await text(stop=["see."]) == "Let me "
    assert await text(stop=["see."], include_stop_str_in_output=True) == "Let me see."
    shown = await text(skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown.endswith("</tool_call><|im_end|>")


@pytest.mark.parametrize("count", [0, 2])
async def test_prompt_scores_come_once_before_the_first_delta(
    stub: inference_pb2_grpc.InferenceStub, dispatcher: FakeDispatcher, count: int
) -> None:
    submit = dispatcher.submit

    async def submit_with_scores(request: Any) -> Any:
        generation = await submit(request)
        generation.prompt_logprobs = [token_logprobs(id_, 3) for id_ in request.prompt_ids[1:]]
        return generation

    dispatcher.submit = submit_with_scores  # type: ignore[method-assign]
    options = inference_pb2.GenerationOptions(prompt_logprobs=count, n=2)
    events = [response async for response in stub.Chat(chat(options=options))]
    assert [event.WhichOneof("event") for event in events].count("prompt") == 1
    scores = events[0].prompt.logprobs
    assert [score.chosen.token_id for score in scores] == list(dispatcher.request.prompt_ids[1:])
    assert {len(score.top) for score in scores} == {count}


async def test_scores_of_a_long_prompt_come_in_messages_that_clients_take(
    stub: inference_pb2_grpc.InferenceStub, dispatcher: FakeDispatcher
) -> None:
    """In one message they would be more than the 4 MiB that clients take unless they say otherwise."""
    message = Message(role="user", content="long " * 800)
    options = inference_pb2.GenerationOptions(prompt_logprobs=20)
    events = [response async for response in stub.Chat(chat(message, options=options))]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[: kinds.count("prompt")] == ["prompt"] * kinds.count("prompt")
    assert kinds.count("prompt") > 1
    assert max(event.ByteSize() for event in events) < 400_000
    scores = [score for event in events for score in event.prompt.logprobs]
    assert [score.chosen.token_id for score in scores] == list(dispatcher.request.prompt_ids[1:])


MISTAKES: list[tuple[inference_pb2.ChatRequest, str]] = [
    (chat(tools=[Tool(name="a b")]), "tools[0].name"),
    (chat(tools=[Tool(name="f"), Tool(name="f")]), "tools[1].name"),
    (chat(tools=[Tool(name="f", parameters="{")]), "tools[0].parameters"),
    (chat(tools=[Tool(name="f", parameters="[]")]), "tools[0].parameters"),
    (chat(tools=[Tool(name="f", parameters='{"type": "string"}')]), "tools[0].parameters"),
    (chat(tools=[Tool(name=f"f{i}") for i in range(129)]), "tools"),
    (chat(tool_choice=ToolChoice(mode=ToolChoice.MODE_REQUIRED)), "tool_choice"),
    (chat(tool_choice=ToolChoice(function="f")), "tool_choice"),
    (chat(tools=TOOLS, tool_choice=ToolChoice(function="h")), "tool_choice"),
    (chat(tools=TOOLS, tool_choice=ToolChoice(function="")), "tool_choice"),
    (chat(tools=TOOLS, tool_choice=ToolChoice(mode=7)), "tool_choice.mode"),  # type: ignore[arg-type]
    (chat(Message(role="user")), "messages[0].content"),
    (chat(Message(role="tool", content="x")), "messages[0].tool_call_id"),
    (chat(Message(role="assistant", tool_calls=[ToolCall(name="f")])), "messages[0].tool_calls[0].id"),
    (chat(Message(role="assistant", tool_calls=[ToolCall(id="1")])), "messages[0].tool_calls[0].name"),
    (chat(continue_final_message=True), "continue_final_message"),
    (chat(chat_template_kwargs="5"), "chat_template_kwargs"),
    (chat(chat_template_kwargs='{"messages": []}'), "chat_template_kwargs"),
    (chat(options=inference_pb2.GenerationOptions(prompt_logprobs=21)), "prompt_logprobs"),
]


async def test_mistakes_are_named(model: ServingModel) -> None:
    dispatcher = FakeDispatcher(answers(model.tokenizer, "x"), vocab_size=VOCAB_SIZE)
    async with running_grpc(model, dispatcher) as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for request, field in MISTAKES:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [response async for response in stub.Chat(request)]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, request
            assert dict(caught.value.trailing_metadata())["tandem-field"] == field  # type: ignore[arg-type]
    assert dispatcher.requests == []


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat(tools=[Tool(name="f", parameters='{"a": "\\ud800"}')]), "tools[0].parameters"),
        (chat(tools=[Tool(name="f", parameters='{"a": ' + "[" * 400 + "]" * 400 + "}")]), "tools[0].parameters"),
        (chat(chat_template_kwargs='{"a": "\\ud800"}'), "chat_template_kwargs"),
    ],
)
async def test_json_that_no_prompt_can_show(
    stub: inference_pb2_grpc.InferenceStub, request_: inference_pb2.ChatRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Chat(request_).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("tandem-field", field) in tuple(caught.value.trailing_metadata() or ())


async def test_calls_whose_arguments_are_no_text(stub: inference_pb2_grpc.InferenceStub) -> None:
    call = ToolCall(id="a", name="f", arguments='{"a": "\\ud800"}')
    request = chat(Message(role="assistant", tool_calls=[call]), Message(role="user", content="hi"))
    assert [response async for response in stub.Chat(request)]


@pytest.mark.parametrize("name", ["x" * 100_000, "\N{GRINNING FACE}" * 10_000])
async def test_a_long_name_is_no_oversized_header(stub: inference_pb2_grpc.InferenceStub, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Chat(chat(model=name)).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
