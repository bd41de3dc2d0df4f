"""Which logits of a step are drawn from, for which choices, and with what allowed.

Grammar masks are computed beside the forward pass: `start` before it, `PendingDraw.finish` after it. Decides nothing
about what becomes of the tokens.
"""

from collections.abc import Sequence as Seq

import torch

from common.engine.grammar import MaskFiller, PendingMasks
from common.engine.sampler import Sampler, SampleRow
from common.sampling import SampledToken
from decode_svc.request import Sequence
from decode_svc.scheduler import Work


class PendingDraw:
    """The rows of one step. Until `finish` their grammar states must be left alone."""

    def __init__(self, sampler: Sampler, rows: Seq[tuple[int, Sequence]], num_logits: int, masks: PendingMasks) -> None:
        """`rows`: index among the step's logits, and the choice that draws from them."""
        self._sampler = sampler
        self._rows = rows
        self._num_logits = num_logits
        self._masks = masks

    def finish(self, logits: torch.Tensor) -> list[tuple[Sequence, SampledToken]]:
        """A token for each choice; `logits` fp32 [R, vocab], one row per item of work that wanted them."""
        if not self._rows:
            return []
        if len(self._rows) != self._num_logits:
            logits = logits[[index for index, _ in self._rows]]
        rows = []
        for (_, choice), allowed in zip(self._rows, self._masks.wait(), strict=True):
            prompt_ids = choice.job.request.prompt_ids
            params, output = choice.job.request.params, choice.output_ids
            rows.append(SampleRow(params, choice.index, len(output), prompt_ids, output, allowed))
        tokens = self._sampler.sample(logits, rows)
        return [(choice, token) for (_, choice), token in zip(self._rows, tokens, strict=True)]


class TokenDrawer:
    """The engine's sampler and mask filler; the filler's thread is the caller's to close."""

    def __init__(self, sampler: Sampler, masks: MaskFiller) -> None:
        self._sampler = sampler
        self._masks = masks

    def start(self, work: Seq[Work]) -> PendingDraw:
        """One logits row per item that wants them; a prompt's row serves every choice that wants its first token."""
        sequences = [item.sequence for item in work if item.wants_logits]
        rows = [
            (index, choice)
            for index, sequence in enumerate(sequences)
            for choice in (sequence.job.fresh_choices if sequence.is_prompt else [sequence])
        ]
        masks = self._masks.start([choice.grammar for _, choice in rows])
        return PendingDraw(self._sampler, rows, len(sequences), masks)
