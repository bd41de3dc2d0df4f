"""Masks that are computed on a thread of their own."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from common.engine.grammar import GrammarState, MaskFiller
from tests.common.engine.grammar.tiny import SPECS, Bench, mask_of, random_output


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    made = MaskFiller()
    yield made
    made.close()


class Slow:
    """A state whose mask comes when it is let."""

    num_words = 1

    def __init__(self, *, limited: bool = True) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.thread = threading.main_thread()
        self._limited = limited

    def fill(self, words: np.ndarray) -> bool:
        self.thread = threading.current_thread()
        self.entered.set()
        assert self.may_end.wait(30)
        words[:] = 5
        return self._limited


def test_each_state_gets_its_mask_and_none_where_there_is_no_state(bench: Bench, filler: MaskFiller) -> None:
    states: list[GrammarState | None] = []
    for seed, spec in enumerate(SPECS.values()):
        grammar = bench.compile(spec)
        state = grammar.start()
        for token in random_output(grammar, seed, longest=5)[:-1]:
            state.accept(token)
        states += [state, None]
    masks = filler.start(states).wait()
    assert len(masks) == len(states)
    for state, mask in zip(states, masks, strict=True):
        assert (mask is None) == (state is None)
        assert state is None or (mask is not None and np.array_equal(mask, mask_of(state)))


def test_they_are_computed_meanwhile_on_the_fillers_thread(filler: MaskFiller) -> None:
    slow = Slow()
    pending = filler.start([slow])  # type: ignore[list-item]
    assert slow.entered.wait(30)
    # Here the forward pass would be running.
    slow.may_end.set()
    [mask] = pending.wait()
    assert mask is not None and mask.tolist() == [5]
    assert slow.thread.name.startswith("grammar-masks")


def test_where_everything_is_allowed_there_is_no_mask(filler: MaskFiller) -> None:
    free = Slow(limited=False)
    free.may_end.set()
    assert filler.start([free, None]).wait() == [None, None]  # type: ignore[list-item]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_without_states_nothing_is_started(filler: MaskFiller, count: int) -> None:
    before = threading.active_count()
    assert filler.start([None] * count).wait() == [None] * count
    assert threading.active_count() == before


def test_what_goes_wrong_is_raised_where_it_is_waited_for(bench: Bench, filler: MaskFiller) -> None:
    state = bench.regex("").start()
    state.accept(2)
    with pytest.raises(AssertionError, match="end of the grammar"):
        filler.start([state]).wait()
    [mask] = filler.start([bench.regex("a").start()]).wait()
    assert mask is not None


def test_masks_of_several_steps_may_be_on_their_way(bench: Bench, filler: MaskFiller) -> None:
    slow, state = Slow(), bench.regex("a").start()
    first, second = filler.start([slow]), filler.start([state])  # type: ignore[list-item]
    slow.may_end.set()
    [mask] = second.wait()
    assert mask is not None and np.array_equal(mask, mask_of(state))
    [other] = first.wait()
    assert other is not None and other.tolist() == [5]


def test_no_thread_is_left_after_close() -> None:
    filler, slow = MaskFiller(), Slow()
    slow.may_end.set()
    filler.start([slow]).wait()  # type: ignore[list-item]
    filler.close()
    filler.close()
    assert slow.thread is not threading.main_thread() and not slow.thread.is_alive()
