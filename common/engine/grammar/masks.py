"""Computes token masks beside the forward pass, on a thread of its own."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from common.engine.grammar.grammar import GrammarState, Words

#: For each place its mask, or None where every token is allowed.
Masks = list[Words | None]


class PendingMasks:
    """Masks that are being computed. Their states belong to the filler's thread until `wait` has returned."""

    def __init__(self, result: "Future[Masks] | None", count: int) -> None:
        self._result = result
        self._count = count

    def wait(self) -> Masks:
        """int32 [ceil(vocab / 32)] per state that was given; None where there was none, or every token is allowed."""
        return [None] * self._count if self._result is None else self._result.result()


class MaskFiller:
    """One thread, started when there is first something to do."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")

    def start(self, states: Sequence[GrammarState | None]) -> PendingMasks:
        """Begin to compute the masks of the tokens that come next. Costs nothing if there is no state."""
        if all(state is None for state in states):
            return PendingMasks(None, len(states))
        return PendingMasks(self._executor.submit(_fill, tuple(states)), len(states))

    def close(self) -> None:
        """Finish what is under way and end the thread."""
        self._executor.shutdown()


def _fill(states: Sequence[GrammarState | None]) -> Masks:
    return [None if state is None else _mask(state) for state in states]


def _mask(state: GrammarState) -> Words | None:
    words = np.empty(state.num_words, dtype=np.int32)
    return words if state.fill(words) else None
