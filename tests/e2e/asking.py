"""Asks a gateway over gRPC for tokens, and says what came and by which way. Knows no test."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from common.pb.tandem.v1.generation_pb2 import RequestStats
from tests.e2e.cluster import PATIENCE


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    #: Of the chosen tokens; empty unless asked for.
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Generated:
    choices: Sequence[Choice]
    cached_tokens: int
    stats: RequestStats

    @property
    def token_ids(self) -> list[int]:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.token_ids

    @property
    def all_token_ids(self) -> list[list[int]]:
        return [choice.token_ids for choice in self.choices]

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
            choice = choices[response.delta.choice]
            choice.token_ids += response.delta.token_ids
            choice.logprobs += [entry.chosen.logprob for entry in response.delta.logprobs]
    return Generated(choices, response.summary.cached_tokens, response.summary.stats)
