"""transformers as the judge of what a model should say."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Oracle:
    """transformers' model: what is right."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._logits = cache(self._compute)

    def logits(self, token_ids: list[int]) -> Tensor:
        """fp32 [T, vocab]."""
        return self._logits(tuple(token_ids))

    @torch.inference_mode()
    def _compute(self, token_ids: tuple[int, ...]) -> Tensor:
        logits: Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits.float()

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        output = list(token_ids)
        for _ in range(count):
            output.append(int(self.logits(output)[-1].argmax()))
        return output[len(token_ids) :]


@dataclass(frozen=True)
class TinyModel:
    folder: Path
    oracle: Oracle
