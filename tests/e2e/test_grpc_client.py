"""The public gRPC API against a whole system: generate, chat, health, reflection, cancel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from openai import OpenAI
from tokenizers import Tokenizer

from common.pb.tandem.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from tests.e2e.cluster import PATIENCE, Cluster, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = "one two three four five six seven eight nine ten, and a smile in the capital of France. " * 3
LENGTH = generation_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def channel(served: Cluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.grpc_target) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def text_ids(tiny_model: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode(TEXT).ids
    return ids


def greedy(max_tokens: int, **options: Any) -> inference_pb2.GenerationOptions:
    return inference_pb2.GenerationOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def collect(responses: Any) -> tuple[str, list[int], inference_pb2.GenerationSummary]:
    """Text, token ids and summary of a stream with one choice; checks its form."""
    *deltas, last = list(responses)
    assert {response.WhichOneof("event") for response in deltas} == {"delta"}
    assert last.WhichOneof("event") == "summary"
    assert [r.delta.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED for r in deltas].index(True) == len(
        deltas
    ) - 1
    ids = [id_ for response in deltas for id_ in response.delta.token_ids]
    return "".join(response.delta.text for response in deltas), ids, last.summary


def test_text_and_its_token_ids_give_the_same(stub: inference_pb2_grpc.InferenceStub, text_ids: list[int]) -> None:
    by_text = collect(stub.Generate(inference_pb2.GenerateRequest(text=TEXT, options=greedy(12)), timeout=PATIENCE))
    token_ids = inference_pb2.TokenIds(ids=text_ids)
    by_ids = collect(
        stub.Generate(inference_pb2.GenerateRequest(token_ids=token_ids, options=greedy(12)), timeout=PATIENCE)
    )
    assert by_text[:2] == by_ids[:2]
    assert len(by_ids[1]) == 12
    for _, _, summary in (by_text, by_ids):
        assert (summary.prompt_tokens, summary.completion_tokens) == (len(text_ids), 12)
        assert summary.stats.decode_worker == "decode-0"
    assert by_ids[2].cached_tokens > 0


def test_what_a_finished_request_says_of_itself(stub: inference_pb2_grpc.InferenceStub) -> None:
    def ask(salt: str) -> inference_pb2.GenerationSummary:
        request = inference_pb2.GenerateRequest(text=TEXT, options=greedy(4, cache_salt=salt))
        return collect(stub.Generate(request, timeout=PATIENCE))[2]

    fresh, again = ask("figures"), ask("figures")
    stats = fresh.stats
    assert (stats.prefill_worker, stats.decode_worker) == ("prefill-0", "decode-0")
    assert stats.prompt_tokens == stats.computed_tokens == fresh.prompt_tokens
    assert (stats.decode_cached_tokens, stats.prefill_cached_tokens, fresh.cached_tokens) == (0, 0, 0)
    assert stats.transfer_messages > 1 and stats.transfer_bytes > 0
    assert stats.prefill_seconds > 0 and stats.transfer_seconds > 0 and stats.transfer_exposed_seconds >= 0
    assert stats.output_tokens == 4
    # Nearly all of it lay on the decode worker: nothing worth a transfer.
    assert again.cached_tokens == again.stats.decode_cached_tokens > 0
    assert again.stats.computed_tokens + again.cached_tokens == again.prompt_tokens


def test_chat_means_the_same_as_over_http(stub: inference_pb2_grpc.InferenceStub, client: OpenAI) -> None:
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content=TEXT)], options=greedy(12)
    )
    text, ids, summary = collect(stub.Chat(request, timeout=PATIENCE))
    answer = client.chat.completions.create(
        model="test-model",
        messages=[{"role": "user", "content": TEXT}],
        temperature=0,
        max_tokens=12,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content == text
    assert answer.usage is not None and answer.usage.prompt_tokens == summary.prompt_tokens
    assert len(ids) == 12


def test_a_bad_field_is_named(stub: inference_pb2_grpc.InferenceStub) -> None:
    request = inference_pb2.GenerateRequest(text=TEXT, options=greedy(4, top_p=1.5))
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(request, timeout=PATIENCE))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in (refused.value.details() or "")


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "tandem.v1.Inference"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = ProtoReflectionDescriptorDatabase(channel)
    assert "tandem.v1.Inference" in reflection.get_services()
    descriptor = DescriptorPool(reflection).FindServiceByName("tandem.v1.Inference")
    assert [method.name for method in descriptor.methods] == ["Generate", "Chat", "Tokenize", "Detokenize"]


def test_cancel_frees_everything(stub: inference_pb2_grpc.InferenceStub, served: Cluster) -> None:
    cancelled = served.status("decode-0").cancelled_total
    stream = stub.Generate(inference_pb2.GenerateRequest(text=TEXT, options=greedy(1500)), timeout=PATIENCE)
    assert next(stream).delta.token_ids
    stream.cancel()
    eventually(lambda: served.status("decode-0").cancelled_total == cancelled + 1, what="the cancel")
    served.wait_idle()


def test_a_deadline_ends_the_request_everywhere(stub: inference_pb2_grpc.InferenceStub, served: Cluster) -> None:
    request = inference_pb2.GenerateRequest(text=TEXT, options=greedy(1500, n=8))
    with pytest.raises(grpc.RpcError) as late:
        list(stub.Generate(request, timeout=0.5))
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    served.wait_idle()
