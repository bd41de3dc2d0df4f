"""Asks for tokens, through a gateway or straight at a decode worker, and says what came and by which way."""

import queue
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.pb.tandem.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc
from common.pb.tandem.v1.generation_pb2 import RequestStats
from common.rpc.convert import logprobs_from_proto, sampling_to_proto
from common.sampling import SamplingParams, TokenLogprobs
from tests.e2e.cluster import PATIENCE


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    #: Of the chosen tokens; empty unless asked for.
    logprobs: list[float] = field(default_factory=list)

    def add(self, token_ids: Iterable[int], logprobs: Iterable[Any]) -> None:
        self.token_ids += token_ids
        self.logprobs += [entry.chosen.logprob for entry in logprobs]


@dataclass(frozen=True)
class Generated:
    choices: Sequence[Choice]
    stats: RequestStats
    #: Of the prompt's tokens from the second on; empty unless asked for.
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    @property
    def token_ids(self) -> list[int]:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.token_ids

    @property
    def all_token_ids(self) -> list[list[int]]:
        return [choice.token_ids for choice in self.choices]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute."""
        return self.stats.prompt_tokens - self.stats.computed_tokens

    @property
    def was_transferred(self) -> bool:
        """Whether KV of the prompt came from a prefill worker."""
        remote = self.stats.prefill_worker != self.stats.decode_worker
        assert remote == (self.stats.transfer_bytes > 0), self.stats
        return remote


def generate(target: str, prompt_ids: Sequence[int], *, n: int = 1, **options: Any) -> Generated:
    """One request to the gateway at `target`; never ended by an end token. Options as in `GenerationOptions`."""
    choices = [Choice() for _ in range(n)]
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt_ids),
        options=inference_pb2.GenerationOptions(n=n, **{"ignore_eos": True, **options}),
    )
    with grpc.insecure_channel(target) as channel:
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=PATIENCE):
            delta = response.delta
            choices[delta.choice].add(delta.token_ids, delta.logprobs)
    summary = response.summary
    assert summary.cached_tokens == summary.stats.prompt_tokens - summary.stats.computed_tokens
    return Generated(choices, summary.stats)


def submit(
    decode: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    prefill: Sequence[str] = (),
    n: int = 1,
    salt: str,
) -> Generated:
    """One request straight to the decode worker at `decode`, as a gateway would send it.

    Args:
        prefill: addresses of prefill workers to ask, best first; empty: the decode worker prefills.
        salt: requests with another one share no cache.
    """
    message = decode_pb2.SubmitRequest(
        request_id=uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        choices=[decode_pb2.ChoicePrefix() for _ in range(n)],
        sampling=sampling_to_proto(params),
        prefill_candidates=[decode_pb2.PrefillCandidate(worker_id=p, address=p) for p in prefill],
        cache_salt=salt,
    )
    outbox: queue.SimpleQueue[decode_pb2.GatewayMessage | None] = queue.SimpleQueue()
    outbox.put(decode_pb2.GatewayMessage(hello=decode_pb2.GatewayHello(gateway_id="test")))
    outbox.put(decode_pb2.GatewayMessage(submit=message))
    with grpc.insecure_channel(decode) as channel:
        try:
            call = decode_pb2_grpc.DecodeStub(channel).Submit(iter(outbox.get, None), timeout=PATIENCE)
            return _follow(call, n)
        finally:
            outbox.put(None)


def _follow(call: Iterable[decode_pb2.DecodeMessage], n: int) -> Generated:
    choices = [Choice() for _ in range(n)]
    scores: list[TokenLogprobs] = []
    for message in call:
        assert message.WhichOneof("message") in ("hello", "accepted", "step"), message
        for part in message.step.prompt_logprobs:
            assert part.first_position == len(scores) + 1, part
            assert not any(choice.token_ids for choice in choices), "prompt log probabilities behind a token"
            scores += map(logprobs_from_proto, part.entries)
        for delta in message.step.deltas:
            assert delta.first_index == len(choices[delta.choice].token_ids), delta
            choices[delta.choice].add(delta.token_ids, delta.logprobs)
        for finished in message.step.finished:
            assert finished.outcome == decode_pb2.OUTCOME_OK, finished
            return Generated(choices, finished.stats, scores)
    raise AssertionError("the worker ended the stream before the request")
