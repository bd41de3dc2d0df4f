"""The official client, unmodified, against the HTTP edge."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from gateway.serving import ServingModel
from tests.gateway.edges import Edge, running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, answers

ANSWER = " Paris, naïve 😀🎉 日本!"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, ANSWER), cached_tokens=3)


@pytest.fixture
async def edge(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[Edge]:
    async with running_http(model, dispatcher) as running:
        yield running
    assert dispatcher.all_closed


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI, dispatcher: FakeDispatcher, model: ServingModel) -> None:
    reply = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(dispatcher.request.prompt_ids)
    assert reply.usage.completion_tokens == len(model.tokenizer.encode(ANSWER)) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    rendered = model.template.render([{"role": "user", "content": "hi"}])
    assert list(dispatcher.request.prompt_ids) == model.tokenizer.encode(rendered)


async def test_chat_stream_equals_plain(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert choices[-1].delta.content is None
        assert not any("\ufffd" in (choice.delta.content or "") for choice in choices)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_chat_stream_helper(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with client.chat.completions.stream(model="tiny", messages=messages) as stream:  # type: ignore[arg-type]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = await client.chat.completions.create(
        model="tiny", messages=messages, logprobs=True, top_logprobs=3, max_tokens=9
    )  # type: ignore[call-overload]
    entries = plain.choices[0].logprobs.content
    assert len(entries) == plain.usage.completion_tokens == 9
    assert plain.choices[0].finish_reason == "length"
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode("utf-8", errors="replace") == plain.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.top_logprobs[-1].logprob == -9999.0
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, logprobs=True, top_logprobs=3, max_tokens=9, stream=True
    )  # type: ignore[call-overload]
    streamed = [
        entry
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert streamed == entries


async def test_completions(client: openai.AsyncOpenAI, dispatcher: FakeDispatcher, model: ServingModel) -> None:
    reply = await client.completions.create(model="tiny", prompt="The capital of France is", logprobs=2)
    choice = reply.choices[0]
    assert (reply.object, choice.text, choice.finish_reason) == ("text_completion", ANSWER, "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None and choice.logprobs.text_offset is not None
    assert reply.usage is not None
    assert len(choice.logprobs.tokens) == reply.usage.completion_tokens
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert ANSWER[offset:].startswith(token)
    assert list(dispatcher.request.prompt_ids) == model.tokenizer.encode("The capital of France is")


async def test_two_prompts_by_two_choices(client: openai.AsyncOpenAI, model: ServingModel) -> None:
    prompts = ["The capital", "one two three"]
    reply = await client.completions.create(model="tiny", prompt=prompts, n=2, echo=True)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [p + ANSWER for p in prompts for _ in range(2)]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(len(model.tokenizer.encode(prompt)) for prompt in prompts)
    assert reply.usage.completion_tokens == 4 * (len(model.tokenizer.encode(ANSWER)) + 1)
    stream = await client.completions.create(model="tiny", prompt=prompts, n=2, echo=True, stream=True)
    texts: dict[int, str] = {}
    finishes: list[int] = []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            finishes += [choice.index] if choice.finish_reason else []
    assert texts == {choice.index: choice.text for choice in reply.choices}
    assert sorted(finishes) == [0, 1, 2, 3]


async def test_prompt_forms_are_equal(
    client: openai.AsyncOpenAI, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    ids = model.tokenizer.encode("one two")
    for prompt in ("one two", ["one two"], ids, [ids]):
        await client.completions.create(model="tiny", prompt=prompt)  # type: ignore[call-overload]
    assert {request.prompt_ids for request in dispatcher.requests} == {tuple(ids)}
    assert len({request.request_id for request in dispatcher.requests}) == 4
    assert len({request.params.seed for request in dispatcher.requests}) == 4


async def test_echo_alone_needs_no_worker(client: openai.AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    reply = await client.completions.create(model="tiny", prompt="one two", echo=True, max_tokens=0)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("one two", "length")
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0
    assert dispatcher.requests == []


async def test_stop_strings_spanning_tokens(client: openai.AsyncOpenAI, model: ServingModel) -> None:
    for start in range(1, 12):
        stop = ANSWER[start : start + 5]
        expected = ANSWER[: ANSWER.index(stop)]
        plain = await client.completions.create(model="tiny", prompt="x", stop=["zzzz", stop])
        assert (plain.choices[0].text, plain.choices[0].finish_reason) == (expected, "stop")
        stream = await client.completions.create(model="tiny", prompt="x", stop=stop, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == expected
        ids = model.tokenizer.encode(ANSWER)
        used = next(count for count in range(len(ids) + 1) if stop in model.tokenizer.decode(ids[:count]))
        assert plain.usage is not None
        assert plain.usage.completion_tokens == used


async def test_options_reach_the_dispatcher(client: openai.AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        max_completion_tokens=7,
        max_tokens=20,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        logit_bias={"5": -100, "400": 1.5},
        n=2,
        service_tier="flex",
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "ignore_eos": True,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "cache_salt": "mine",
        },
    )
    request = dispatcher.request
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 3, 0.1)
    assert (params.seed, params.max_tokens, params.min_tokens) == (2**64 - 1, 7, 2)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.5, -1.5, 1.2)
    assert params.logit_bias == {5: -100.0, 400: 1.5}
    assert (params.ignore_eos, params.stop_token_ids, params.logprobs) == (True, (9,), None)
    assert (request.num_choices, request.request_class.value, request.cache_salt) == (2, "batch", "mine")


async def test_unset_max_tokens_is_the_rest_of_the_context(
    client: openai.AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    await client.completions.create(model="tiny", prompt=[5, 6, 7])
    await client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=None)
    assert [request.params.max_tokens for request in dispatcher.requests] == [253, 253]


async def test_models(client: openai.AsyncOpenAI) -> None:
    listed = await client.models.list()
    assert [entry.id for entry in listed.data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


async def test_sync_client(edge: Edge) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="x", stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == ANSWER


async def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": 0.8, "top_k": 20, "do_sample": true}'
    )
    model = tiny_model(tmp_path)
    dispatcher = FakeDispatcher(answers(model.tokenizer, "ok"))
    async with (
        running_http(model, dispatcher) as edge,
        openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none") as client,
    ):
        await client.completions.create(model="tiny", prompt="x")
        await client.completions.create(model="tiny", prompt="x", temperature=0, top_p=1)
    first, second = (request.params for request in dispatcher.requests)
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (0.6, 0.8, 20, 1.0)
    assert (second.temperature, second.top_p, second.greedy) == (0.0, 1.0, True)
