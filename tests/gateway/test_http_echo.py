"""Completions that show their prompt (`echo`), score it (`logprobs`, `prompt_logprobs`), or are the best of several."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.sampling import Candidate, FinishReason, TokenLogprobs
from common.text.tokenizer import Tokenizer
from gateway.completion import ChoiceDelta, Usage
from gateway.generation import GenerationRequest, TokenDelta
from gateway.http.completion_format import MAX_PROMPT_SCORES, CompletionFormat, CompletionShape
from gateway.http.echo import aligned_echo, plain_echo
from gateway.http.json_body import json_bytes
from gateway.http.prompt_logprobs import prompt_logprobs_json
from gateway.serving import ServingModel
from tests.common.text.model_folders import byte_level_folder
from tests.factories.http import NO_TLS
from tests.gateway.edges import running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, Script, answers, deltas, prompt_scores

URL = "/v1/completions"
ANSWER = " Paris, naïve 😀!"
PROMPT = "one 😀 naïve two"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, ANSWER))


@pytest.fixture
async def client(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[httpx.AsyncClient]:
    async with running_http(model, dispatcher) as edge, httpx.AsyncClient(base_url=edge.url, verify=NO_TLS) as client:
        yield client
    assert dispatcher.all_closed


async def whole(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(URL, json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def check_entries(
    model: ServingModel, choice: Any, prompt: str, prompt_ids: list[int], output_ids: list[int], top: int
) -> None:
    """Prompt and output as one row of tokens whose offsets index the choice's text."""
    logprobs, text = choice["logprobs"], choice["text"]
    tokens = [model.tokenizer.token_text(id_) for id_ in [*prompt_ids, *output_ids]]
    assert text.startswith(prompt)
    assert logprobs["tokens"] == tokens
    assert {len(row) for row in logprobs.values()} == {len(tokens)}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(prompt_ids)] == [-3.0 - i for i in range(len(prompt_ids) - 1)]
    for values in logprobs["top_logprobs"][1 : len(prompt_ids)]:
        assert top <= len(values) <= top + 1
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    # A token stands at the character in which its first byte lies.
    start = 0
    for id_, offset in zip([*prompt_ids, *output_ids], offsets, strict=True):
        assert len(text[:offset].encode()) <= start
        assert start < len(text[: offset + 1].encode()) or offset == len(text)
        start += len(model.tokenizer.token_bytes(id_))


@pytest.mark.parametrize("top", [0, 2, 20])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_with_logprobs(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServingModel, as_ids: bool, n: int, top: int
) -> None:
    texts = [PROMPT, "three"]
    ids = [model.tokenizer.encode(text) for text in texts]
    body = {"prompt": ids if as_ids else texts, "echo": True, "logprobs": top, "n": n}
    reply = await whole(client, **body)
    output = [*model.tokenizer.encode(ANSWER), 2]
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * n))
    for choice in reply["choices"]:
        prompt = choice["index"] // n
        check_entries(model, choice, texts[prompt], ids[prompt], output, top)
    assert {request.params.prompt_logprobs for request in dispatcher.requests} == {top}

    chunks = await streamed(client, **body)
    for expected in reply["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        prompt = expected["index"] // n
        assert parts[0]["text"].startswith(texts[prompt])
        assert len(parts[0]["logprobs"]["tokens"]) > len(ids[prompt]) - 1
        joined = {key: [v for part in parts for v in part["logprobs"][key]] for key in expected["logprobs"]}
        assert joined == expected["logprobs"]
        assert "".join(part["text"] for part in parts) == expected["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_scoring_alone(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServingModel, n: int, stream: bool
) -> None:
    """`max_tokens: 0` as evaluation harnesses send it: a token has to be drawn, and nobody hears of it."""
    ids = model.tokenizer.encode(PROMPT)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0, "n": n}
    if stream:
        chunks = await streamed(client, **body, stream_options={"include_usage": True})
        choices, usage = [chunk["choices"][0] for chunk in chunks[:-1]], chunks[-1]["usage"]
    else:
        reply = await whole(client, **body)
        choices, usage = reply["choices"], reply["usage"]
    assert sorted(choice["index"] for choice in choices) == list(range(n))
    for choice in choices:
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        check_entries(model, choice, PROMPT, ids, [], 1)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 0)
    assert (dispatcher.request.params.max_tokens, dispatcher.request.params.prompt_logprobs) == (1, 1)


async def test_a_prompt_of_one_token_has_nothing_but_null(client: httpx.AsyncClient, model: ServingModel) -> None:
    reply = await whole(client, prompt=[70], echo=True, logprobs=2, max_tokens=0, prompt_logprobs=1)
    choice = reply["choices"][0]
    assert choice["logprobs"] == {
        "tokens": [model.tokenizer.token_text(70)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    assert choice["prompt_logprobs"] == [None]


@pytest.mark.parametrize("others", [{}, {"logprobs": 1}, {"logprobs": 5, "echo": True}, {"n": 2}])
async def test_prompt_logprobs(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServingModel, others: dict[str, Any]
) -> None:
    prompts = [PROMPT, "three"]
    reply = await whole(client, prompt=prompts, prompt_logprobs=2, max_tokens=2, **others)
    n = others.get("n", 1)
    for choice in reply["choices"]:
        ids = model.tokenizer.encode(prompts[choice["index"] // n])
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert len(rest) == len(ids) - 1
        for position, (entry, id_) in enumerate(zip(rest, ids[1:], strict=True)):
            assert next(iter(entry)) == str(id_)
            assert entry[str(id_)]["logprob"] == -3.0 - position
            assert entry[str(id_)]["decoded_token"] == model.tokenizer.token_text(id_)
            assert {key for key in entry if key != str(id_)} == {"5", "6"} - {str(id_)}
        assert (choice["logprobs"] is None) == ("logprobs" not in others)
    assert {request.params.prompt_logprobs for request in dispatcher.requests} == {5 if "echo" in others else 2}
    assert "prompt_logprobs" not in (await whole(client, prompt="x"))["choices"][0]


def test_ranks_are_known_for_the_best_and_null_for_others(model: ServingModel) -> None:
    top = (Candidate(8, -0.1), Candidate(7, -2.0), Candidate(9, float("-inf")))
    scores = [TokenLogprobs(Candidate(7, -2.0), top), TokenLogprobs(Candidate(20, -9.0), top)]
    for count, others in ((0, {}), (1, {"8": 1}), (3, {"8": 1, "7": 2, "9": 3})):
        parts = prompt_logprobs_json(model.tokenizer, [5, 7, 20], scores, count)
        first, second, third = (entry for part in parts for entry in part)
        assert first is None
        assert second is not None
        assert third is not None
        assert {key: value["rank"] for key, value in second.items()} == {"7": 2, **others}
        assert {key: value["rank"] for key, value in third.items()} == {"20": None, **others}
    assert second["9"]["logprob"] == -9999.0
    assert list(prompt_logprobs_json(model.tokenizer, [5], [], 1)) == [[None]]


TEXTS = st.text(st.sampled_from("ab é😀\n日<|im_end|>"), max_size=20)


@given(TEXTS, st.lists(st.integers(0, 400), max_size=12))
def test_echo_is_the_text_and_offsets_index_it(model: ServingModel, text: str, ids: list[int]) -> None:
    tokenizer = model.tokenizer
    for prompt, tokens in ((text, tokenizer.encode(text)), (ids, ids)):
        echo = aligned_echo(tokenizer, prompt, tokens)
        assert echo.text == plain_echo(tokenizer, prompt).text
        assert len(echo.offsets) == len(tokens)
        assert list(echo.offsets) == sorted(echo.offsets)
        for id_, offset in zip(tokens, echo.offsets, strict=True):
            spelled = tokenizer.token_text(id_)
            assert offset <= len(echo.text)
            if prompt is text and not spelled.startswith("bytes:"):
                assert echo.text.startswith(spelled, offset)


def test_what_the_tokenizer_puts_around_a_text_takes_no_room(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
    ids = tokenizer.encode("one two")
    plain = aligned_echo(tokenizer, "one two", ids)
    begun = aligned_echo(tokenizer, "one two", [1, *ids])
    ended = aligned_echo(tokenizer, "one two", [*ids, 2])
    assert plain.text == begun.text == ended.text == "one two"
    assert begun.offsets == (0, *plain.offsets)
    assert ended.offsets == (*plain.offsets, 7)
    # Tokens that do not spell the text are themselves the echo.
    other = aligned_echo(tokenizer, "ONE TWO", ids)
    assert (other.text, other.offsets) == ("one two", plain.offsets)


def choices_scored(scores: list[float]) -> Any:
    """Every choice is one word and the end token; the scores are those of the words."""

    def script_for(request: GenerationRequest) -> Script:
        script: list[TokenDelta] = []
        for choice in range(request.num_choices):
            logprobs = () if request.params.logprobs is None else (TokenLogprobs(Candidate(70, scores[choice])),)
            finish = FinishReason.LENGTH
            script.append(TokenDelta(choice, 0, (70 + choice,), logprobs, finish_reason=finish))
        return script

    return script_for


@pytest.mark.parametrize(
    ("n", "scores", "shown"),
    [
        (1, [-2.0, -1.0, -3.0], [1]),
        (2, [-2.0, -1.0, -3.0], [1, 0]),
        (2, [-1.0, -1.0, -1.0], [0, 1]),
        (1, [float("-inf"), float("nan"), -5000.0], [2]),
        (3, [-2.0, -1.0, -3.0], [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("logprobs", [None, 0])
async def test_best_of(
    client: httpx.AsyncClient,
    dispatcher: FakeDispatcher,
    model: ServingModel,
    n: int,
    scores: list[float],
    shown: list[int],
    logprobs: int | None,
) -> None:
    dispatcher.script_for = choices_scored(scores)
    reply = await whole(client, prompt=["a", "b"], n=n, best_of=3, logprobs=logprobs, max_tokens=1)
    texts = [model.tokenizer.token_text(70 + choice) for choice in shown]
    assert [choice["text"] for choice in reply["choices"]] == texts * 2
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * n))
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in reply["choices"])
    # All that was generated counts.
    assert reply["usage"]["completion_tokens"] == 6
    assert {request.num_choices for request in dispatcher.requests} == {3}


async def test_best_of_compares_means_and_not_sums(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    def script_for(request: GenerationRequest) -> Script:
        long = deltas([70] * 5, choice=0, finish=FinishReason.LENGTH, per_delta=5, logprobs=0)
        short = TokenDelta(1, 0, (71,), (TokenLogprobs(Candidate(71, -1.0)),), FinishReason.LENGTH)
        return [*long, short]

    dispatcher.script_for = script_for
    reply = await whole(client, prompt="x", best_of=2)
    # Five tokens of -0.5 each are likelier than one of -1.
    assert len(reply["choices"][0]["text"]) == 5


async def test_prompt_scores_come_with_the_first_delta_of_each_choice(
    model: ServingModel, dispatcher: FakeDispatcher, client: httpx.AsyncClient
) -> None:
    await whole(client, prompt="one two", echo=True, logprobs=3, n=2)
    generation = dispatcher.generations[0]
    assert generation.prompt_logprobs == prompt_scores(generation.request)
    assert len(generation.prompt_logprobs) == len(model.tokenizer.encode("one two")) - 1


@pytest.mark.parametrize(
    ("prompts", "fields", "field"),
    [
        (1, {"prompt_logprobs": 20, "n": 128}, "prompt_logprobs"),
        (100, {"prompt_logprobs": 20}, "prompt_logprobs"),
        (8, {"logprobs": 5, "echo": True, "n": 50}, "logprobs"),
        (8, {"logprobs": 5, "echo": True, "n": 50, "stream": True}, "logprobs"),
        (8, {"logprobs": 5, "echo": True, "prompt_logprobs": 1, "n": 40}, "prompt_logprobs"),
    ],
)
async def test_more_scores_of_prompts_than_an_answer_may_hold_are_refused(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, prompts: int, fields: dict[str, Any], field: str
) -> None:
    """One short request would otherwise ask for gigabytes."""
    body = {"prompt": [[5] * 250] * prompts, "max_tokens": 1, **fields}
    response = await client.post(URL, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert f"more than {MAX_PROMPT_SCORES} log probabilities" in response.json()["error"]["message"]
    assert not dispatcher.requests


async def test_choices_of_one_prompt_share_its_scores(model: ServingModel) -> None:
    ids = [5, 6, 7]
    echo = aligned_echo(model.tokenizer, ids, ids)
    shape = CompletionShape([ids], [echo], n=3, best_of=3, logprobs=1, prompt_logprobs=2)
    scores = (TokenLogprobs(Candidate(6, -1.0), (Candidate(6, -1.0),)),) * 2
    format_ = CompletionFormat("m", model.tokenizer, shape)
    for index in range(3):
        await format_.collect(index, ChoiceDelta(index, "", (), FinishReason.LENGTH, scores))
    answer = format_.whole(Usage())
    first, *others = answer["choices"]
    for other in others:
        assert other["prompt_logprobs"] is first["prompt_logprobs"]
    first, *others = json.loads(await json_bytes(answer))["choices"]
    assert len(first["prompt_logprobs"]) == len(first["logprobs"]["tokens"]) == 3
    for other in others:
        assert other["logprobs"] == first["logprobs"]
