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

    @torch.inference_mode()
    def greedy_cached(self, token_ids: list[int], count: int) -> list[int]:
        """As `greedy`, with transformers' own KV cache, for models that are not tiny."""
        output: list[int] = []
        fed, past = token_ids, None
        for _ in range(count):
            step = self._model(torch.tensor([fed]), past_key_values=past, use_cache=True, logits_to_keep=1)
            past = step.past_key_values
            fed = [int(step.logits[0, -1].argmax())]
            output += fed
        return output


@dataclass(frozen=True)
class TinyModel:
    folder: Path
    oracle: Oracle
