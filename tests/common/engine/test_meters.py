"""Figures and speeds of an engine: which step counts as what."""

import pytest

from common.engine.block_pool import BlockPool
from common.engine.meters import Figures, Meters, Snapshot
from common.engine.scheduling import StepPacer


class Pacer(StepPacer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(64, 0.1)
        self.told: list[tuple[int, float, int]] = []

    def record(self, num_tokens: int, seconds: float, context_tokens: int = 0) -> None:
        self.told.append((num_tokens, seconds, context_tokens))


def snapshot(meters: Meters, running: int = 0, waiting: int = 0) -> Snapshot:
    pool = BlockPool(5, 4)
    pool.allocate(2)
    return meters.snapshot(pool, running=running, waiting=waiting, queued_tokens=7, transfers=1, preemptions=3)


def test_steps_of_decodes_tell_one_speed_and_all_others_the_other() -> None:
    pacer = Pacer()
    meters = Meters(pacer)
    meters.record_step([(10, 11), (30, 31)], decoded=2, seconds=0.5)
    meters.record_step([(0, 8)], decoded=0, seconds=2.0)
    meters.record_step([(8, 16), (11, 12)], decoded=1, seconds=2.0)
    seen = snapshot(meters)
    assert seen.decode_tokens_per_second == pytest.approx(2 / 0.5)
    assert seen.prefill_tokens_per_second == pytest.approx(16 / 4.0)
    assert seen.figures == Figures(tokens_computed=16, tokens_decoded=3, steps=3, busy_seconds=4.5)
    assert pacer.told == [(2, 0.5, 20), (8, 2.0, 4), (9, 2.0, 11)]


def test_what_was_computed_and_could_not_be_used_is_no_speed_and_counts_later() -> None:
    pacer = Pacer()
    meters = Meters(pacer)
    meters.record_step([(0, 8)], decoded=0, seconds=1.0)
    # A prompt's last token beside a decode, a decode beside one that draws, and nobody who draws.
    meters.record_step([(7, 8), (20, 21)], decoded=1, seconds=0.5, postponed=1)
    meters.record_step([(10, 11), (20, 21)], decoded=1, seconds=0.5, postponed=1)
    meters.record_step([(7, 8)], decoded=0, seconds=9.0, postponed=1)
    meters.record_step([(0, 8), (7, 8)], decoded=0, seconds=1.0, postponed=1)
    seen = snapshot(meters)
    assert seen.decode_tokens_per_second == pytest.approx(2 / 1.0)
    assert seen.prefill_tokens_per_second == pytest.approx(16 / 2.0)
    assert seen.figures == Figures(tokens_computed=16, tokens_decoded=2, steps=5, busy_seconds=12.0)
    # Steps are as long as what they compute makes them.
    assert [tokens for tokens, _, _ in pacer.told] == [8, 2, 2, 1, 9]


def test_a_snapshot_stays_as_it_is() -> None:
    meters = Meters(Pacer())
    before = snapshot(meters)
    meters.figures.accepted += 1
    meters.record_step([(0, 1)], decoded=1, seconds=1.0)
    assert before.figures == Figures()
    assert (before.free, before.cached, before.owned) == (3, 0, 2)
    assert (before.queued_tokens, before.transfers, before.preemptions) == (7, 1, 3)


@pytest.mark.parametrize(("running", "waiting"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_idle_is_who_has_nothing_left(running: int, waiting: int) -> None:
    assert snapshot(Meters(Pacer()), running, waiting).is_idle is (running == waiting == 0)


def test_a_request_ends_in_one_of_three_ways() -> None:
    figures = Figures()
    for ok, cancelled in ((True, False), (False, True), (False, False), (False, False)):
        figures.count_end(ok=ok, cancelled=cancelled)
    assert (figures.finished, figures.cancelled, figures.failed) == (1, 1, 2)
