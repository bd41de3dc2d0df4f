"""An answer of any length leaves the event loop its turns: what is done between two of them is bounded, by count.

Most of the work on a long answer is on its log probabilities, and each of them asks the tokenizer for a text.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import httpx
import pytest
from prometheus_client import CollectorRegistry

from common.pb.tandem.v1 import decode_pb2 as pb
from common.pb.tandem.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from common.text.tokenizer import Tokenizer
from gateway.accounting import EdgeMetrics
from gateway.dispatch.output import Output
from gateway.generation import GenerationRequest, GenerationStats, ServingLimits
from gateway.http.app import HttpServices, create_app
from gateway.pace import PART
from gateway.serving import ServingModel
from tests.common.text.model_folders import byte_level_folder
from tests.factories.turns import counted_turns
from tests.gateway.edges import running_grpc

TOKENS, TOP = 400, 20
IDS = [65 + index % 50 for index in range(TOKENS)]
#: The part that is sent and the one that must be known to follow it, in the writer and in the format of an echo.
BOUND = 3 * PART


@dataclass(slots=True)
class Work:
    """Texts that the tokenizer was asked for."""

    total: int = 0
    #: Most of them between two turns of the event loop.
    most: int = 0


class CountingTokenizer(Tokenizer):
    asked = 0

    def token_text(self, token_id: int) -> str:
        type(self).asked += 1
        return super().token_text(token_id)


class Backlog:
    """A dispatcher whose generations are all there at once, as if their reader had slept through them."""

    def __init__(self, token_ids: Sequence[int] = IDS) -> None:
        self._ids = token_ids

    async def submit(self, request: GenerationRequest) -> Output:
        params, length = request.params, len(request.prompt_ids)
        output = Output(
            request.num_choices,
            num_prompt_logprobs=0 if params.prompt_logprobs is None else length - 1,
            on_cancel_choice=lambda choice: None,
            on_close=lambda: None,
        )
        if params.prompt_logprobs is not None:
            entries = rows(request.prompt_ids[1:], params.prompt_logprobs)
            assert output.put_prompt_logprobs(pb.PromptLogprobsDelta(first_position=1, entries=entries))
        ids = self._ids[: params.max_tokens]
        for choice in range(request.num_choices):
            delta = pb.Delta(
                choice=choice,
                token_ids=ids,
                logprobs=[] if params.logprobs is None else rows(ids, params.logprobs),
                finish_reason=generation_pb2.FINISH_REASON_LENGTH,
            )
            assert output.put(delta)
        output.finish(GenerationStats(length, len(ids), 0))
        return output

    def limits(self) -> ServingLimits:
        return ServingLimits(4096, 401)


def rows(ids: Any, count: int) -> list[generation_pb2.TokenLogprobs]:
    best = [generation_pb2.Candidate(token_id=70 + index, logprob=-1.0 - index) for index in range(count)]
    own = (generation_pb2.Candidate(token_id=id_, logprob=-0.5) for id_ in ids)
    return [generation_pb2.TokenLogprobs(chosen=chosen, top=best) for chosen in own]


@contextmanager
def watched() -> Iterator[Work]:
    """Looks at each turn of the loop how much was done since the one before."""
    work, before = Work(), CountingTokenizer.asked

    async def watch() -> None:
        nonlocal before
        while True:
            done, before = CountingTokenizer.asked - before, CountingTokenizer.asked
            work.most, work.total = max(work.most, done), work.total + done
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    yield work
    watching.cancel()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    folder = byte_level_folder(tmp_path_factory.mktemp("tiny"))
    return replace(ServingModel.load(folder, "tiny"), tokenizer=CountingTokenizer.load(folder))


def asking(model: ServingModel, backlog: Backlog) -> httpx.AsyncClient:
    """Takes every byte at once: no socket makes the server wait."""
    services = HttpServices(model, backlog, EdgeMetrics(CollectorRegistry()), lambda: (True, ""))
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(services)), base_url="http://gateway")


@pytest.fixture
async def client(model: ServingModel) -> AsyncIterator[httpx.AsyncClient]:
    async with asking(model, Backlog()) as client:
        yield client


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": TOP}
LONG_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * TOKENS}]}
COMPLETION: dict[str, Any] = {"prompt": "x", "logprobs": TOP}
SCORED = {"prompt": IDS, "max_tokens": 1}
RESPONSE: dict[str, Any] = {"input": "x", "top_logprobs": TOP, "max_output_tokens": TOKENS}


@pytest.mark.parametrize(
    ("path", "body", "streamed"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": TOKENS}, True),
        ("/v1/chat/completions", CHAT | {"max_tokens": TOKENS // 4, "n": 4}, True),
        ("/v1/chat/completions", LONG_CHAT | {"prompt_logprobs": TOP, "max_tokens": 1}, False),
        ("/v1/completions", COMPLETION | {"max_tokens": TOKENS}, True),
        ("/v1/completions", COMPLETION | {"prompt": ["a", "b"], "max_tokens": TOKENS // 2}, True),
        ("/v1/completions", COMPLETION | {"max_tokens": TOKENS // 2, "best_of": 2}, False),
        ("/v1/completions", SCORED | {"logprobs": TOP, "echo": True}, True),
        ("/v1/completions", SCORED | {"prompt_logprobs": TOP, "n": 2}, False),
        ("/v1/responses", RESPONSE, True),
    ],
)
async def test_over_http(client: httpx.AsyncClient, path: str, body: dict[str, Any], streamed: bool) -> None:
    for stream in (False, True) if streamed else (False,):
        with watched() as work:
            response = await client.post(path, json=body | {"stream": stream})
        assert response.status_code == 200, response.text
        assert work.total > 2 * BOUND
        assert work.most <= BOUND, f"{work.most} texts of {work.total} between two turns, stream {stream}"


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http_where_all_is_held_back_to_the_end(model: ServingModel, stream: bool) -> None:
    """Space is part of a message only if words follow."""
    (blank,) = model.tokenizer.encode(" ")
    async with asking(model, Backlog([blank] * TOKENS)) as client:
        with watched() as work:
            response = await client.post("/v1/responses", json=RESPONSE | {"stream": stream})
    assert response.status_code == 200, response.text
    assert work.total > 2 * BOUND
    assert work.most <= BOUND


async def test_a_streamed_echo_is_the_whole_one(client: httpx.AsyncClient) -> None:
    """It comes in several chunks."""
    body = SCORED | {"prompt": "naïve 😀 text, " * 30, "logprobs": TOP, "echo": True}
    (whole,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    response = await client.post("/v1/completions", json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert len(chunks) > 5
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


Call = Callable[[inference_pb2_grpc.InferenceStub, inference_pb2.GenerationOptions], Any]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (
            lambda stub, options: stub.Generate(inference_pb2.GenerateRequest(text="x", options=options)),
            {"logprobs": TOP},
        ),
        (
            lambda stub, options: stub.Generate(
                inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=IDS), options=options)
            ),
            {"prompt_logprobs": TOP, "max_tokens": 1},
        ),
    ],
)
async def test_over_grpc(model: ServingModel, call: Call, options: dict[str, int]) -> None:
    wanted = inference_pb2.GenerationOptions(**{"max_tokens": TOKENS, **options})
    async with running_grpc(model, Backlog()) as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with watched() as work:
            responses = [response async for response in call(stub, wanted)]
        assert responses[-1].HasField("summary")
        assert work.total > 2 * BOUND
        assert work.most <= BOUND


async def test_without_log_probabilities_tokens_are_counted() -> None:
    output = Output(2, on_cancel_choice=lambda choice: None, on_close=lambda: None)
    ids = [65] * (5 * PART + 1)
    for choice in range(2):
        assert output.put(pb.Delta(choice=choice, token_ids=ids, finish_reason=generation_pb2.FINISH_REASON_STOP))
    output.finish(GenerationStats(1, len(ids), 0))
    with counted_turns() as turns:
        deltas = [delta async for delta in output]
    assert turns.count >= 10
    assert max(len(delta.token_ids) for delta in deltas) == PART
    for choice in range(2):
        of_choice = [delta for delta in deltas if delta.choice == choice]
        assert [id_ for delta in of_choice for id_ in delta.token_ids] == ids
        assert [delta.first_index for delta in of_choice] == list(range(0, len(ids), PART))
        assert [delta.finish_reason is None for delta in of_choice] == [True] * 5 + [False]
    assert [delta.choice for delta in deltas] == [0, 1] * 6, "choices take turns, too"
