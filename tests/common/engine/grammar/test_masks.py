"""Masks that are computed on a thread of their own."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from common.engine.grammar import LATE, GrammarState, MaskFiller
from common.sampling import GrammarSpec
from tests.common.engine.grammar.tiny import SPECS, Bench, mask_of, masks_along, random_output


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    made = MaskFiller()
    yield made
    made.close()


class Slow:
    """A state whose mask comes when it is let."""

    def __init__(self, *, limited: bool = True, dear: bool = False) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.thread = threading.main_thread()
        self.mask_seconds, self.misses = float(dear), 0
        self.num_computed = 0
        self._mask = np.array([5], dtype=np.int32) if limited else None

    def next_mask(self) -> np.ndarray | None:
        self.thread = threading.current_thread()
        self.entered.set()
        assert self.may_end.wait(30)
        self.num_computed += 1
        return self._mask


def let(**fields: bool) -> Slow:
    slow = Slow(**fields)
    slow.may_end.set()
    return slow


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
        assert mask is not LATE and (mask is None) == (state is None)
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
    assert filler.start([let(limited=False), None]).wait() == [None, None]  # type: ignore[list-item]


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
    filler, states = MaskFiller(), [let(), let(dear=True)]
    filler.start(states).wait()  # type: ignore[arg-type]
    filler.close()
    filler.close()
    for state in states:
        assert state.thread is not threading.main_thread() and not state.thread.is_alive()


class TestLate:
    """With no patience at all, so that what is not there at once is late."""

    @pytest.fixture
    def hasty(self) -> Iterator[MaskFiller]:
        made = MaskFiller(0.0)
        yield made
        made.close()

    def test_one_that_is_not_there_in_time_is_there_later(self, hasty: MaskFiller) -> None:
        slow = Slow()
        assert hasty.start([slow]).wait() == [LATE]  # type: ignore[list-item]
        assert slow.misses == 1
        slow.may_end.set()
        while (masks := hasty.start([slow]).wait()) == [LATE]:  # type: ignore[list-item]
            pass
        [mask] = masks
        assert isinstance(mask, np.ndarray) and mask.tolist() == [5] and slow.misses == 0

    def test_dear_ones_keep_no_usual_one_waiting(self) -> None:
        filler, dear, usual = MaskFiller(5.0), Slow(dear=True), let()
        first = filler.start([dear])  # type: ignore[list-item]
        assert dear.entered.wait(30)
        [mask] = filler.start([usual]).wait()  # type: ignore[list-item]
        assert isinstance(mask, np.ndarray) and dear.num_computed == 0
        dear.may_end.set()
        assert first.wait() != [LATE]
        filler.close()

    @pytest.mark.parametrize("with_state", [True, False])
    def test_dear_ones_are_not_waited_for_where_others_can_draw(self, with_state: bool) -> None:
        # Would wait for ever.
        filler, dear = MaskFiller(1e6), Slow(dear=True)
        for misses in range(1, 4):
            other, mask = filler.start([let() if with_state else None, dear]).wait()  # type: ignore[list-item]
            assert (other is not None) == with_state and mask is LATE and dear.misses == misses
        dear.may_end.set()
        while (mask := filler.start([None, dear]).wait()[1]) is LATE:  # type: ignore[list-item]
            pass
        assert isinstance(mask, np.ndarray) and mask.tolist() == [5]
        filler.close()

    def test_dear_ones_are_waited_for_where_nobody_else_can_draw(self) -> None:
        filler, dear = MaskFiller(1e6), Slow(dear=True)
        pending = filler.start([dear])  # type: ignore[list-item]
        threading.Timer(0.01, dear.may_end.set).start()
        assert pending.wait() != [LATE]
        filler.close()

    def test_what_has_not_begun_in_time_is_not_begun(self, hasty: MaskFiller) -> None:
        slow, others = Slow(dear=True), [let(dear=True) for _ in range(3)]
        assert hasty.start([slow, *others]).wait() == [LATE] * 4  # type: ignore[list-item]
        slow.may_end.set()
        hasty.close()
        assert [state.num_computed for state in others] == [0, 0, 0]

    def test_who_was_late_goes_first_next_time(self) -> None:
        filler, order = MaskFiller(5.0), list[int]()

        class Noted(Slow):
            def next_mask(self) -> np.ndarray | None:
                order.append(self.misses)
                return super().next_mask()

        states = [Noted(dear=True) for _ in range(4)]
        for state, misses in zip(states, (0, 2, 0, 1), strict=True):
            state.misses = misses
            state.may_end.set()
        assert LATE not in filler.start(states).wait()  # type: ignore[arg-type,comparison-overlap]
        assert order == [2, 1, 0, 0] and all(state.misses == 0 for state in states)
        filler.close()

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_masks_of_tokens_that_are_pushed_are_those_of_tokens_that_are_accepted(
        self, bench: Bench, spec: GrammarSpec
    ) -> None:
        grammar = bench.compile(spec)
        output = random_output(grammar, 7, longest=60)
        pushed = grammar.start()
        for token, expected in zip(output, masks_along(grammar, output), strict=True):
            assert not pushed.terminated
            mask = pushed.next_mask()
            assert np.array_equal(np.full_like(expected, -1) if mask is None else mask, expected)
            assert pushed.next_mask() is mask and pushed.take_seconds() >= 0 == pushed.take_seconds()
            pushed.push(token)
        assert pushed.terminated == (output[-1] in grammar.end_token_ids)

    def test_a_token_that_the_mask_did_not_allow_is_an_assertion(self, bench: Bench) -> None:
        state = bench.regex("a").start()
        state.push(bench.encode("b")[0])
        # Again and again: the first time it may be for a mask that is late, and nobody hears of it.
        for _ in range(2):
            with pytest.raises(AssertionError, match="does not allow"):
                state.next_mask()
