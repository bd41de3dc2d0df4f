"""Counter-based randomness: a number is a pure function of (seed, choice, output index), with no state.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), the generator that CUDA,
JAX and numpy also use: key = seed, counter = (output index, choice). Whoever computes it, in whatever batch and
after whatever fail-over, gets the same number.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


def philox4x32(counter: Words, key: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> Words:
    """Ten rounds over arrays of 32-bit words held in uint64, elementwise."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _32) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _32) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], choices: Sequence[int], output_indices: Sequence[int]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) per (seed, choice, output index).

    Seeds are unsigned 64-bit; choices unsigned 32-bit; output indices unsigned 64-bit.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    index = np.asarray(output_indices, dtype=np.uint64)
    choice = np.asarray(choices, dtype=np.uint64)
    counter = (index & _LOW, index >> _32, choice, np.zeros_like(choice))
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _32))
    # 52 bits and a half: symmetric, never 0 and never 1 (the half is the 53rd bit, so nothing is rounded).
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
