"""From logits to tokens, as a pure function of (logits, parameters, seed, choice, output index)."""

from common.engine.sampler.row import SampleRow
from common.engine.sampler.sampler import Sampler

__all__ = ["SampleRow", "Sampler"]
