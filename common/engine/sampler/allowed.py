"""Grammar masks over logits: what a mask lacks can never be drawn."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.sampler.row import SampleRow

#: Elements that are worked on at a time on the CPU, so that temporaries stay in the caches and keep their pages.
_CPU_SLICE = 3 << 16
#: float32 [256, 8]: for each byte of a mask what is added to the logits of its eight tokens, 0 or -inf.
_ADDED = torch.from_numpy(
    np.where(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
    ).astype(np.float32)
)


def apply_allowed(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Set to -inf, in place, the logits [R, vocab] of tokens that their row's mask lacks.

    A mask goes to the logits' device as it is, in bits, and becomes numbers there. No logit may be NaN or +inf.
    """
    masked = [i for i, row in enumerate(rows) if row.allowed is not None]
    size = max(1, _CPU_SLICE // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
    for start in range(0, len(masked), size):
        _apply(logits, rows, masked[start : start + size])


def _apply(logits: Tensor, rows: Sequence[SampleRow], numbers: Sequence[int]) -> None:
    vocab_size = logits.shape[1]
    words = np.stack([_checked(rows[i], vocab_size) for i in numbers])
    mask_bytes = torch.from_numpy(words.view(np.uint8)).to(logits.device).to(torch.int32)
    added = torch.nn.functional.embedding(mask_bytes, _ADDED.to(logits.device)).flatten(1)[:, :vocab_size]
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        logits[numbers[0] : numbers[-1] + 1] += added
    else:
        logits[torch.tensor(numbers, device=logits.device)] += added


def allows_other_than(allowed: NDArray[np.int32], token_ids: NDArray[np.int64], vocab_size: int) -> bool:
    """Whether a mask allows any token of the vocabulary that is not among `token_ids`."""
    bits = allowed.astype("<i4").view(np.uint8)
    others = bits[: -(-vocab_size // 8)].copy()
    if vocab_size % 8:
        others[-1] &= (1 << vocab_size % 8) - 1
    np.bitwise_and.at(others, token_ids // 8, ~(1 << token_ids % 8).astype(np.uint8))
    return bool(others.any())


def _checked(row: SampleRow, vocab_size: int) -> NDArray[np.int32]:
    assert row.allowed is not None
    assert row.allowed.dtype == np.int32, f"mask of {row.allowed.dtype}"
    assert row.allowed.shape == (-(-vocab_size // 32),), f"mask {row.allowed.shape} for a vocabulary of {vocab_size}"
    return row.allowed.astype("<i4")
