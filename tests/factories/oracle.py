"""transformers as the judge of what a model should say."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig


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
        """As `greedy`, by transformers' `generate` with its own KV cache, for models that are not tiny."""
        prompt = torch.tensor([token_ids])
        endless = GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0)
        output = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=endless)
        new: list[int] = output[0, len(token_ids) :].tolist()
        return new


@dataclass(frozen=True)
class TinyModel:
    folder: Path
    oracle: Oracle
