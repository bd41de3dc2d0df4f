"""Drives sequences through a `ModelRunner` by hand, as a scheduler would, with scattered block tables."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.engine.batch import SequenceChunk
from common.engine.kv_cache import KVCache, KVSpec
from common.engine.models.decoder import CausalLM
from common.engine.runner import ModelRunner


@dataclass
class TestSequence:
    """Tokens, how many of them are computed, and their blocks."""

    __test__ = False
    token_ids: list[int]
    computed: int = 0
    block_table: list[int] = field(default_factory=list)


class SequenceDriver:
    """A runner over a poisoned cache: slots that nobody wrote hold NaN, so that reading one shows."""

    def __init__(self, model: CausalLM, *, block_size: int = 16, num_blocks: int = 96) -> None:
        spec = KVSpec.for_model(model.config, dtype=model.dtype, block_size=block_size, num_blocks=num_blocks)
        self.kv_cache = KVCache(spec, model.device)
        self.kv_cache.data.fill_(float("nan"))
        self.runner = ModelRunner(model, self.kv_cache)
        self._free = random.Random(0).sample(range(num_blocks), num_blocks)

    def sequence(
        self, token_ids: Sequence[int], prefix_of: TestSequence | None = None, shared: int = 0
    ) -> TestSequence:
        """A new sequence; its first `shared` blocks are those of `prefix_of`, computed already."""
        block_size = self.kv_cache.spec.block_size
        table = prefix_of.block_table[:shared] if prefix_of is not None else []
        return TestSequence(list(token_ids), shared * block_size, list(table))

    def allocate(self) -> int:
        return self._free.pop()

    def chunk(self, sequence: TestSequence, length: int | None = None, wants_logits: bool = True) -> SequenceChunk:
        """The next `length` tokens (default: all that are left) of `sequence`, which count as computed from now."""
        start = sequence.computed
        end = len(sequence.token_ids) if length is None else min(start + length, len(sequence.token_ids))
        while len(sequence.block_table) * self.kv_cache.spec.block_size < end:
            sequence.block_table.append(self.allocate())
        sequence.computed = end
        return SequenceChunk(sequence.token_ids[start:end], start, list(sequence.block_table), wants_logits)

    def prefill(self, sequence: TestSequence, chunk_size: int | None = None) -> Tensor:
        """Compute the rest of `sequence` in chunks: fp32 logits [vocab] after its last token."""
        while sequence.computed < len(sequence.token_ids):
            logits = self.runner.run([self.chunk(sequence, chunk_size)])
        return logits[0]

    def greedy(self, sequence: TestSequence, count: int, chunk_size: int | None = None) -> list[int]:
        """The `count` best tokens that follow `sequence`, one by one."""
        start = len(sequence.token_ids)
        for _ in range(count):
            sequence.token_ids.append(int(self.prefill(sequence, chunk_size).argmax()))
        return sequence.token_ids[start:]


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(i) for i in torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))]
