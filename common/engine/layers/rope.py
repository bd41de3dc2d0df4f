"""Tables of rotary positions, computed once at load; fp32 whatever the model's dtype."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.config import RopeConfig


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Of every position and pair; fp32 [max_length, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor


def rope_tables(config: RopeConfig, head_dim: int, max_length: int, device: torch.device) -> RopeTables:
    """Tables for the positions [0, max_length) on `device`."""
    positions = torch.arange(max_length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, head_dim))
    return RopeTables(angles.cos().to(device), angles.sin().to(device))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair: fp32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _stretch_low_frequencies(config, frequencies)
    return frequencies


def _stretch_low_frequencies(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3: high frequencies stay, low ones are divided by the factor, between them a linear blend."""
    context = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    low = wavelengths > context / config.low_freq_factor
    high = wavelengths < context / config.high_freq_factor
    return torch.where(low, frequencies / config.factor, torch.where(high, frequencies, blended))
