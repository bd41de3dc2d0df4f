"""Which logits of a step are drawn from, for which choices, and with what allowed.

Grammar masks are computed beside the forward pass: `start` before it, `PendingDraw.finish` after it. Who has no mask by
then draws in a later step. Decides nothing about what becomes of the tokens.
"""

from collections.abc import Sequence as Seq

import torch

from common.engine.grammar import LATE, MaskFiller, PendingMasks
from common.engine.sampler import Sampler, SampleRow
from common.sampling import SampledToken
from decode_svc.request import Sequence
from decode_svc.scheduler import Work


class PendingDraw:
    """The rows of one step. Until `finish` their grammar states must be left alone."""

    def __init__(
        self, sampler: Sampler, sequences: Seq[Sequence], rows: Seq[tuple[int, Sequence]], masks: PendingMasks
    ) -> None:
        """
        Args:
            sequences: whose logits the step computes.
            rows: index among them, and the choice that draws from these logits.
        """
        self._sampler = sampler
        self._sequences = sequences
        self._rows = rows
        self._masks = masks

    def finish(self, logits: torch.Tensor) -> tuple[list[tuple[Sequence, SampledToken]], set[Sequence]]:
        """A token for each choice whose mask is there, and the sequences from whose logits some other one has to draw.

        Args:
            logits: fp32 [R, vocab], one row per item of work that wanted them.
        """
        rows: list[SampleRow] = []
        choices: list[Sequence] = []
        places: list[int] = []
        late: set[Sequence] = set()
        for (index, choice), allowed in zip(self._rows, self._masks.wait(), strict=True):
            if allowed is LATE:
                late.add(self._sequences[index])
                continue
            prompt_ids = choice.job.request.prompt_ids
            params, output = choice.job.request.params, choice.output_ids
            rows.append(SampleRow(params, choice.index, len(output), prompt_ids, output, allowed))
            choices.append(choice)
            places.append(index)
        if not rows:
            return [], late
        if places != list(range(len(self._sequences))):
            logits = logits[places]
        return list(zip(choices, self._sampler.sample(logits, rows), strict=True)), late


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
        return PendingDraw(self._sampler, sequences, rows, masks)
