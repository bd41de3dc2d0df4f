"""Whose turn it is to compile: new jobs at once, heavy ones in turns, and never too many of these."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.grammar.turns import Turns

#: In whole numbers nothing is rounded.
SLICE = 20


class Machine:
    """Runs whose turn it is, in pieces of time; `costs` are what jobs take."""

    def __init__(self, costs: dict[int, int], *, max_kept: int = 3, max_heavy: int = 9) -> None:
        self.turns = Turns(slice_seconds=SLICE, max_kept=max_kept, max_heavy=max_heavy)
        self.used = dict.fromkeys(costs, 0)
        self.costs = costs
        self.done: list[int] = []
        self.ended: list[int] = []
        self.lost: list[int] = []
        self.heavy: set[int] = set()
        self.max_kept = max_kept

    def run(self, seconds: int) -> int | None:
        """The job that ran, if any."""
        job = self.turns.next()
        if job is None:
            return None
        self.used[job] = min(self.used[job] + seconds, self.costs[job])
        self.turns.note(job, self.used[job])
        if self.used[job] >= SLICE:
            self.heavy.add(job)
        if self.used[job] == self.costs[job]:
            self.turns.remove(job)
            self.done.append(job)
        if (surplus := self.turns.surplus()) is not None:
            self.turns.remove(surplus)
            self.ended.append(surplus)
        if (loser := self.turns.to_restart()) is not None:
            self.turns.restart(loser)
            self.used[loser] = 0
            self.lost.append(loser)
        begun = [job for job, used in self.used.items() if used and job in self.turns]
        assert len(begun) <= self.max_kept + 1, f"{begun} have begun"
        return job


def test_each_has_a_slice_in_the_order_in_which_they_came_and_then_another() -> None:
    machine = Machine(dict.fromkeys((1, 2, 3), 50))
    for job in machine.costs:
        machine.turns.add(job)
    assert [machine.run(10) for _ in range(18)] == [*[1, 1, 2, 2, 3, 3] * 2, 1, 2, 3, None, None, None]


def test_a_new_one_interrupts_a_heavy_one_which_then_goes_on() -> None:
    machine = Machine({1: 900, 2: 5, 3: 900})
    machine.turns.add(1)
    assert [machine.run(15) for _ in range(2)] == [1, 1] and machine.turns.left(1) == 10
    machine.turns.add(2)
    machine.turns.add(3)
    assert [machine.run(10) for _ in range(6)] == [2, 3, 3, 1, 3, 3]


def test_a_new_one_does_not_interrupt_another_new_one() -> None:
    machine = Machine({1: 900, 2: 900})
    machine.turns.add(1)
    assert machine.run(10) == 1
    machine.turns.add(2)
    assert machine.run(10) == 1 and machine.run(10) == 2


def test_too_many_heavy_ones_begin_anew_when_there_is_room_in_the_order_in_which_they_came() -> None:
    machine = Machine(dict.fromkeys(range(1, 6), 100), max_kept=2)
    for job in machine.costs:
        machine.turns.add(job)
    while machine.turns.next() is not None:
        machine.run(SLICE)
    assert machine.lost == [3, 4, 5] and machine.done == [1, 2, 3, 4, 5] and not machine.ended


def test_beyond_that_the_newest_is_ended() -> None:
    machine = Machine(dict.fromkeys(range(1, 5), 900), max_kept=1, max_heavy=2)
    for job in machine.costs:
        machine.turns.add(job)
    while machine.turns.next() is not None:
        machine.run(SLICE)
    assert machine.ended == [3, 4] and machine.done == [1, 2]


@settings(max_examples=30)
@given(
    piece=st.sampled_from([3, 7, SLICE]),
    max_kept=st.integers(1, 4),
    pause=st.integers(1, 3),
    share=st.integers(1, 3),
)
def test_heavy_ones_are_done_in_the_order_in_which_they_came_however_many_come_behind(
    piece: int, max_kept: int, pause: int, share: int
) -> None:
    """The next one comes `pause` slices and a bit after each; every `share`-th is heavy."""
    first = range(1, 2 * max_kept + 2)
    costs = {job: 5 * SLICE if job in first or job % share == 0 else SLICE // 2 for job in range(1, 80)}
    machine = Machine(costs, max_kept=max_kept, max_heavy=2 * max_kept + 6)
    for job in first:
        machine.turns.add(job)
    for job in range(first.stop, 80):
        machine.turns.add(job)
        for _ in range(-(-SLICE * pause // piece) + 1):
            machine.run(piece)
    while machine.turns.next() is not None:
        machine.run(piece)
    done = [job for job in machine.done if costs[job] > SLICE]
    assert sorted(done[: len(first)]) == list(first)


@given(
    arrivals=st.lists(st.tuples(st.integers(1, 240), st.integers(0, 6)), min_size=1, max_size=15),
    piece=st.sampled_from([3, 7, SLICE]),
    max_kept=st.integers(1, 4),
    more_heavy=st.integers(0, 6),
    cancelled=st.sets(st.integers(1, 15), max_size=4),
)
def test_all_end_and_light_ones_wait_for_a_slice_of_each_new_one_before_them(
    arrivals: list[tuple[int, int]], piece: int, max_kept: int, more_heavy: int, cancelled: set[int]
) -> None:
    """`arrivals`: what each job takes, and how many pieces of time pass before the next one comes."""
    costs = {job: cost for job, (cost, _) in enumerate(arrivals, 1)}
    machine = Machine(costs, max_kept=max_kept, max_heavy=max_kept + more_heavy)
    clock, came, over, before = 0, dict[int, int](), dict[int, int](), dict[int, int]()

    def tick() -> None:
        nonlocal clock
        machine.run(piece)
        clock += 1
        for job in (*machine.done, *machine.ended):
            over.setdefault(job, clock)

    for job, (_, pause) in enumerate(arrivals, 1):
        before[job] = sum(other not in machine.heavy for other in machine.costs if other in machine.turns)
        machine.turns.add(job)
        came[job] = clock
        for _ in range(pause):
            tick()
        if job in cancelled and job in machine.turns:
            machine.turns.remove(job)
    while len(machine.turns):
        tick()
    assert {*machine.done, *machine.ended} | cancelled >= set(machine.costs)
    pieces = -(-SLICE // piece)
    for job, cost in costs.items():
        if cost < SLICE and job not in cancelled:
            assert job in machine.done, f"job {job}, a light one, was ended"
            assert over[job] - came[job] <= (before[job] + 1) * pieces
