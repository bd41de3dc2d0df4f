"""Log probabilities of a prompt's tokens as they came: messages, made into values where they are read.

As values of ours they would be hundreds of thousands of objects, made at once and held until the answer is written.
"""

from collections.abc import Iterable, Sequence
from typing import overload

from common.pb.tandem.v1 import generation_pb2 as pb
from common.rpc.convert import logprobs_from_proto
from common.sampling import TokenLogprobs


class PromptScores(Sequence[TokenLogprobs]):
    """Of the prompt's tokens from the second on."""

    def __init__(self) -> None:
        self._entries: list[pb.TokenLogprobs] = []

    def extend(self, entries: Iterable[pb.TokenLogprobs]) -> None:
        self._entries.extend(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, slice):
            return [logprobs_from_proto(entry) for entry in self._entries[index]]
        return logprobs_from_proto(self._entries[index])
