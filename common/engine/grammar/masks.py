"""Computes token masks beside the forward pass, on threads of its own, as far as a step may wait for them."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum

from common.engine.grammar.grammar import GrammarState, Words

#: Seconds from which on a state is dear: its masks keep none of the usual ones waiting. Usual are some 0.00005.
_DEAR_SECONDS = 0.002
#: How long a step of decodes waits for its masks once everything else is there. Enough for hundreds of usual ones.
STEP_SECONDS = 0.05


class Late(Enum):
    """In place of a mask that was not there in time. It is kept for the next step once it is."""

    LATE = "late"


LATE = Late.LATE
#: For each place its mask, None where every token is allowed, or LATE.
Masks = list[Words | Late | None]


class PendingMasks:
    """Masks that are being computed. Their states must be left alone until `wait` has returned, late ones beyond."""

    def __init__(
        self, count: int, batches: "Sequence[_Batch]", awaited: "Sequence[_Batch]", wait_seconds: float | None
    ) -> None:
        """`awaited`: those of the batches that are waited for; the others may be there all the same."""
        self._count = count
        self._batches = batches
        self._awaited = awaited
        self._wait_seconds = wait_seconds

    def wait(self) -> Masks:
        """int32 [ceil(vocab / 32)] per state that was given; None where there was none, or every token is allowed.

        Those that have not begun by the end of the wait are not computed any more; the one that has goes on.
        """
        masks: Masks = [None] * self._count
        wait([batch.future for batch in self._awaited], self._wait_seconds)
        for batch in self._batches:
            if batch.future.done():
                batch.future.result()
            for place, mask in batch.close():
                masks[place] = mask
        return masks


class MaskFiller:
    """Two threads, started when there is first something to do: for usual states and for dear ones.

    Dear ones have the time of the forward pass; longer they are waited for only where nobody else could draw. What a
    mask costs is known when it is there, so that a state that becomes dear has kept others waiting once.
    """

    def __init__(self, wait_seconds: float | None = None) -> None:
        """`wait_seconds`: how long `PendingMasks.wait` waits at most; None: until all are there, dear ones too."""
        self._wait_seconds = wait_seconds
        self._usual = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")
        self._dear = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-dear-masks")

    def start(self, states: Sequence[GrammarState | None]) -> PendingMasks:
        """Begin to compute the masks of the tokens that come next. Costs nothing if there is no state.

        A state whose mask was late may be given again: it is not computed twice.
        """
        todo = [(place, state) for place, state in enumerate(states) if state is not None]
        # Whoever has waited longest goes first, or the last ones would never have their turn.
        todo.sort(key=lambda item: -item[1].misses)
        usual = [item for item in todo if item[1].mask_seconds < _DEAR_SECONDS]
        dear = [item for item in todo if item[1].mask_seconds >= _DEAR_SECONDS]
        batches = [_Batch(items, pool) for items, pool in ((usual, self._usual), (dear, self._dear)) if items]
        only_dear = len(dear) == len(states)
        awaited = batches if only_dear or self._wait_seconds is None else batches[: bool(usual)]
        return PendingMasks(len(states), batches, awaited, self._wait_seconds)

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        self._usual.shutdown()
        self._dear.shutdown()


class _Batch:
    """The states of one step that one thread computes."""

    def __init__(self, todo: Sequence[tuple[int, GrammarState]], pool: ThreadPoolExecutor) -> None:
        self._todo = todo
        self._lock = threading.Lock()
        self._closed = False
        self._masks: dict[int, Words | None] = {}
        self.future: Future[None] = pool.submit(self._run)

    def close(self) -> list[tuple[int, Words | Late | None]]:
        """Begin no more of them. What there is, LATE for the rest."""
        with self._lock:
            self._closed = True
        for place, state in self._todo:
            state.misses = 0 if place in self._masks else state.misses + 1
        return [(place, self._masks.get(place, LATE)) for place, _ in self._todo]

    def _run(self) -> None:
        for place, state in self._todo:
            if self._closed:
                return
            mask = state.next_mask()
            with self._lock:
                if not self._closed:
                    self._masks[place] = mask
