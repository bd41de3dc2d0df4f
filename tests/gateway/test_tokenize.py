"""Tokenize and detokenize, over HTTP and gRPC: what a prompt is made of, as the generating calls would send it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from gateway.http.services import HttpOptions
from gateway.serving import ServingModel
from tests.common.text.model_folders import sentencepiece_folder
from tests.factories.http import NO_TLS
from tests.gateway.edges import running_grpc, running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, answers

TEXTS = ["hi", "", "naïve 😀 日本", "<|im_start|>user", "one two three"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <|im_end|>"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, "x"), max_request_tokens=1000)


@pytest.fixture
async def client(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[httpx.AsyncClient]:
    options = HttpOptions(max_body_bytes=4 * 1024 * 1024)
    async with (
        running_http(model, dispatcher, options=options) as edge,
        httpx.AsyncClient(base_url=edge.url, verify=NO_TLS, timeout=20) as client,
    ):
        yield client


@pytest.fixture
async def stub(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with running_grpc(model, dispatcher) as (address, _), grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def asked(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


@pytest.mark.parametrize("text", TEXTS)
async def test_there_and_back(client: httpx.AsyncClient, model: ServingModel, text: str) -> None:
    reply = await asked(client, "/tokenize", prompt=text, model="tiny")
    ids = model.tokenizer.encode(text)
    assert reply == {"count": len(ids), "max_model_len": 1000, "tokens": ids, "token_strs": None}
    assert await asked(client, "/detokenize", tokens=ids, model="tiny") == {"prompt": text}


async def test_a_text_is_what_a_completion_sends(client: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    reply = await asked(client, "/tokenize", prompt="one <|im_end|> two")
    await asked(client, "/v1/completions", prompt="one <|im_end|> two")
    assert tuple(reply["tokens"]) == dispatcher.request.prompt_ids


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"chat_template_kwargs": {"x": 1}},
        {"add_generation_prompt": False},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "wel"}], "continue_final_message": True},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    ],
)
async def test_a_conversation_is_what_a_chat_sends(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, more: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES} | more
    tokenized = await client.post("/tokenize", json=body)
    chat = await client.post("/v1/chat/completions", json=body)
    assert (tokenized.status_code, chat.status_code) == (200, 200)
    assert tuple(tokenized.json()["tokens"]) == dispatcher.request.prompt_ids


async def test_token_strs_are_the_vocabularys(client: httpx.AsyncClient, model: ServingModel) -> None:
    reply = await asked(client, "/tokenize", prompt="one two 😀<|im_end|>", return_token_strs=True)
    assert len(reply["token_strs"]) == reply["count"]
    assert [model.tokenizer.token_id(piece) for piece in reply["token_strs"]] == reply["tokens"]
    assert "<|im_end|>" in reply["token_strs"]


async def test_special_tokens(tmp_path: Path) -> None:
    """A model with a begin token: texts get it unless it is not wanted, conversations only if it is."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = ServingModel.load(sentencepiece_folder(tmp_path, chat_template=template), "tiny")
    chat = {"messages": [{"role": "user", "content": "the the"}]}
    async with (
        running_http(model, FakeDispatcher(answers(model.tokenizer, "x"))) as edge,
        httpx.AsyncClient(base_url=edge.url, verify=NO_TLS, timeout=20) as client,
    ):
        bos = model.tokenizer.bos_id
        bare = (await asked(client, "/tokenize", prompt="the the", add_special_tokens=False))["tokens"]
        assert bos not in bare
        assert (await asked(client, "/tokenize", prompt="the the"))["tokens"] == [bos, *bare]
        assert (await asked(client, "/tokenize", **chat))["tokens"] == bare
        assert (await asked(client, "/tokenize", add_special_tokens=True, **chat))["tokens"] == [bos, *bare]


async def test_long_ones_are_worked_on_beside_the_loop(client: httpx.AsyncClient, model: ServingModel) -> None:
    text = "one two three " * 1000
    reply = await asked(client, "/tokenize", prompt=text[:9000], return_token_strs=True)
    assert reply["tokens"] == model.tokenizer.encode(text[:9000])
    assert reply["count"] > reply["max_model_len"], "counting is not generating"
    assert await asked(client, "/detokenize", tokens=reply["tokens"] * 3) == {"prompt": text[:9000] * 3}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "documents": [{"text": "x"}]}, "documents"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, 401]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})])
async def test_unknown_model_and_large_body(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await client.post(path, json=body | {"model": "nope"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    response = await client.post(path, json=body | {"x": "x" * (5 * 1024 * 1024)})
    assert response.status_code == 413


async def test_no_ids_are_no_text(client: httpx.AsyncClient) -> None:
    assert await asked(client, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize("text", TEXTS)
async def test_grpc_there_and_back(
    stub: inference_pb2_grpc.InferenceStub, client: httpx.AsyncClient, text: str
) -> None:
    over_http = await asked(client, "/tokenize", prompt=text)
    reply = await stub.Tokenize(inference_pb2.TokenizeRequest(model="tiny", text=text))
    assert list(reply.token_ids) == over_http["tokens"]
    assert reply.max_model_len == 1000
    back = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=reply.token_ids))
    assert back.text == text


async def test_grpc_conversation(stub: inference_pb2_grpc.InferenceStub, client: httpx.AsyncClient) -> None:
    over_http = await asked(client, "/tokenize", messages=MESSAGES)
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(**message) for message in MESSAGES])
    reply = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    assert list(reply.token_ids) == over_http["tokens"]


@pytest.mark.parametrize(
    ("method", "request_", "status", "field"),
    [
        ("Tokenize", inference_pb2.TokenizeRequest(), grpc.StatusCode.INVALID_ARGUMENT, "input"),
        ("Tokenize", inference_pb2.TokenizeRequest(model="no", text="x"), grpc.StatusCode.NOT_FOUND, "model"),
        (
            "Tokenize",
            inference_pb2.TokenizeRequest(chat=inference_pb2.ChatRequest(model="no")),
            grpc.StatusCode.NOT_FOUND,
            "model",
        ),
        ("Tokenize", inference_pb2.TokenizeRequest(text="x" * 1_000_000), grpc.StatusCode.INVALID_ARGUMENT, "text"),
        ("Detokenize", inference_pb2.DetokenizeRequest(model="no"), grpc.StatusCode.NOT_FOUND, "model"),
        ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[401]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
    ],
)
async def test_grpc_errors(
    stub: inference_pb2_grpc.InferenceStub, method: str, request_: Any, status: grpc.StatusCode, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(request_)
    assert caught.value.code() is status
    assert dict(caught.value.trailing_metadata() or ())["tandem-field"] == field
