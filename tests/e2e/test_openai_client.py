"""The official OpenAI client, unmodified, against a whole system with prefill and decode apart."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "test-model"
#: Longer than a few blocks, so that it is prefilled on the prefill worker.
PROMPT = "one two three four five six seven eight nine ten, said the capital of France; " * 3
MESSAGES: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant of Paris. " * 3},
    {"role": "user", "content": "Say hello, please! And then count from one to ten."},
]
#: A random model ends when it likes; with this it writes as much as it is asked for.
ENDLESS = {"ignore_eos": True}


def content(chunks: Iterable[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_stream_says_the_same_as_the_whole_answer(client: OpenAI, served: Cluster) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked, extra_body=ENDLESS)
    assert (whole.object, whole.choices[0].message.role, whole.choices[0].finish_reason) == (
        "chat.completion",
        "assistant",
        "length",
    )
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}, extra_body=ENDLESS)
    )
    assert content(chunks) == whole.choices[0].message.content != ""
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 24)
    assert usage.total_tokens == usage.prompt_tokens + 24
    # The second time the prompt was known.
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens
    served.wait_idle()


def test_completion_stream_says_the_same_as_the_whole_answer(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**asked, extra_body=ENDLESS)
    chunks = list(client.completions.create(**asked, stream=True, extra_body=ENDLESS))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 24


def test_several_prompts_in_one_completion(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8, "extra_body": ENDLESS}
    both = client.completions.create(prompt=[PROMPT, "one two"], **asked)
    alone = [client.completions.create(prompt=prompt, **asked) for prompt in (PROMPT, "one two")]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]


def test_three_choices_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 1.0, "max_tokens": 16, "n": 3}
    first, again, other = (client.chat.completions.create(**asked, seed=seed, extra_body=ENDLESS) for seed in (7, 7, 8))
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    assert [choice.message.content for choice in other.choices] != texts
    assert first.usage is not None and first.usage.completion_tokens == 3 * 16
    chunks = list(client.chat.completions.create(**asked, seed=7, stream=True, extra_body=ENDLESS))
    assert [content(chunks, index) for index in range(3)] == texts


def test_without_a_seed_answers_differ(client: OpenAI) -> None:
    texts = {
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, extra_body=ENDLESS).choices[0].text
        for _ in range(2)
    }
    assert len(texts) == 2


def test_chat_logprobs(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, extra_body=ENDLESS)
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert len(entries) == 6
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # Greedy takes the most likely one.
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.logprob <= 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True, extra_body=ENDLESS)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


def test_completion_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=5, logprobs=2, extra_body=ENDLESS
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 5
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs)


def test_stop_string_ends_the_answer_before_it(client: OpenAI, served: Cluster) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 48}
    text = client.completions.create(**asked, extra_body=ENDLESS).choices[0].text
    start = next(i for i in range(4, len(text) - 2) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[start : start + 2]
    for streamed in (False, True):
        answer = client.completions.create(**asked, stop=["no such text", stop], stream=streamed, extra_body=ENDLESS)
        chunks: list[Any] = list(answer) if streamed else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:start]
        assert chunks[-1].choices[0].finish_reason == "stop"
    served.wait_idle()


def test_typed_errors_name_the_field(client: OpenAI, served: Cluster) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    for field, value in (
        ("temperature", 9.0),
        ("n", 0),
        ("max_tokens", 0),
        ("top_p", -0.5),
        ("logit_bias", {"9999": 1}),
    ):
        wrong: dict[str, Any] = {field: value}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, **wrong)
        assert refused.value.param == field, refused.value.message
        assert field in refused.value.message
    served.wait_idle()


def test_what_never_fits_is_refused_at_once(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as prompt:
        client.completions.create(model=MODEL, prompt=[5] * 4096)
    assert (prompt.value.param, prompt.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as output:
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4096)
    assert (output.value.param, output.value.code) == ("max_tokens", "context_length_exceeded")


def test_traffic_of_a_chat_application(client: OpenAI, served: Cluster) -> None:
    """As Open WebUI does: list models, stream a chat, then ask for title and tags, while others chat too."""
    model = client.models.list().data[0].id

    def converse(number: int) -> tuple[str, int]:
        messages: list[Any] = [{"role": "user", "content": f"Hello, number {number}. {PROMPT}"}]
        cached = 0
        for turn in range(2):
            chunks = list(
                client.chat.completions.create(
                    model=model,
                    messages=messages,
                    stream=True,
                    stream_options={"include_usage": True},
                    max_tokens=12,
                    extra_body=ENDLESS,
                )
            )
            usage = chunks[-1].usage
            assert usage is not None and usage.completion_tokens == 12 and usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            messages += [
                {"role": "assistant", "content": content(chunks)},
                {"role": "user", "content": f"Go on, turn {turn}."},
            ]
        return f"### Task: a title for\n{messages}", cached

    def title(task: str) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": task}], stream=False, max_completion_tokens=10
        )
        return answer.choices[0].finish_reason

    with ThreadPoolExecutor(4) as pool:
        conversations = list(pool.map(converse, range(4)))
        # The second turn begins as the first did: that part was not computed again.
        assert all(cached > 32 for _, cached in conversations), conversations
        assert set(pool.map(title, (task for task, _ in conversations))) <= {"stop", "length"}
    served.wait_idle()
