"""Runs batches of sequence chunks through a model. Knows no policy: what to run is the scheduler's business."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.engine.batch import SequenceChunk, build_batch
from common.engine.kv_cache import KVCache
from common.engine.models.decoder import CausalLM
from common.engine.scoring import score_tokens
from common.sampling import TokenLogprobs

#: Called with each layer's index once its K and V have been written, and with an event that tells when they really
#: are there: None if they are already (CPU), else recorded on the compute stream.
OnLayer = Callable[[int, torch.cuda.Event | None], None]

#: Decode batch sizes and chunk lengths that `warm_up` runs: kernels choose their code by ranges of these.
WARM_UP_DECODES = (1, 4, 16, 64)
WARM_UP_CHUNKS = (2, 64, 256)
#: Rows whose logits are there at a time when tokens are scored: 64 MB at a vocabulary of 128k.
SCORED_ROWS = 128


class ModelRunner:
    """A model with its KV cache."""

    def __init__(self, model: CausalLM, kv_cache: KVCache) -> None:
        assert kv_cache.device == model.device, (kv_cache.device, model.device)
        self.model = model
        self.kv_cache = kv_cache

    def run(self, chunks: Sequence[SequenceChunk], on_layer: OnLayer | None = None) -> Tensor:
        """Compute `chunks` (at least one, none empty) in one pass, writing their KV.

        Returns fp32 logits [R, vocab] on the model's device, one row per chunk that wants them, in their order.
        """
        logits, scores = self.run_scored(chunks, on_layer)
        assert not any(scores), "scores that nobody takes"
        return logits

    def run_scored(
        self, chunks: Sequence[SequenceChunk], on_layer: OnLayer | None = None
    ) -> tuple[Tensor, list[list[TokenLogprobs]]]:
        """As `run`, and for each chunk its targets' log probabilities, in order; none for one without targets.

        They are taken from the raw logits and do not depend on the other chunks or on how a prompt was cut (but for
        the rounding of the multiplications).
        """
        batch = build_batch(chunks, self.kv_cache.spec.block_size, self.model.device)
        longest = self.model.config.max_length
        assert batch.max_seq_len <= longest, f"a sequence of {batch.max_seq_len} tokens; the model ends at {longest}"
        announce = None if on_layer is None else self._announcer(on_layer)
        hidden = self.model.forward(batch, self.kv_cache, announce)
        num_logits = batch.logits_indices.shape[0]
        return self.model.logits(hidden[:num_logits]), self._score(chunks, hidden[num_logits:])

    def _score(self, chunks: Sequence[SequenceChunk], hidden: Tensor) -> list[list[TokenLogprobs]]:
        """`hidden`: the rows of all targets, in order. Never has more than SCORED_ROWS of their logits."""
        scores: list[list[TokenLogprobs]] = []
        row = 0
        for chunk in chunks:
            entries: list[TokenLogprobs] = []
            for i in range(0, len(chunk.targets), SCORED_ROWS):
                targets = chunk.targets[i : i + SCORED_ROWS]
                entries += score_tokens(self.model.logits(hidden[row : row + len(targets)]), targets, chunk.num_top)
                row += len(targets)
            scores.append(entries)
        return scores

    def warm_up(self) -> None:
        """Run small batches so that what first use costs is paid now. Overwrites KV: only before serving."""
        capacity = self.kv_cache.spec.num_blocks * self.kv_cache.spec.block_size
        longest = min(capacity, self.model.config.max_length)
        for size in WARM_UP_DECODES:
            self.run([self._dummy_chunk(1)] * size)
        for length in WARM_UP_CHUNKS:
            self.run([self._dummy_chunk(min(length, longest))])
        self.run([self._dummy_chunk(1), self._dummy_chunk(min(WARM_UP_CHUNKS[0], longest))])
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _dummy_chunk(self, length: int) -> SequenceChunk:
        num_blocks = -(-length // self.kv_cache.spec.block_size)
        return SequenceChunk(token_ids=[0] * length, start=0, block_table=range(num_blocks), wants_logits=True)

    def _announcer(self, on_layer: OnLayer) -> Callable[[int], None]:
        if self.model.device.type != "cuda":
            return lambda layer: on_layer(layer, None)

        def announce(layer: int) -> None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.model.device))
            on_layer(layer, event)

        return announce
