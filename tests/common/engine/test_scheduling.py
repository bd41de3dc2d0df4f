"""Budgets, pacing and speed: pure arithmetic over times that the tests invent."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.scheduling import SpeedMeter, StepPacer, TokenBudget


@given(st.integers(0, 1000), st.lists(st.integers(0, 400)))
def test_a_budget_grants_what_is_left_and_no_more(total: int, wishes: list[int]) -> None:
    budget = TokenBudget(total)
    granted = [budget.take(wish) for wish in wishes]
    assert all(grant <= wish for grant, wish in zip(granted, wishes, strict=True))
    assert sum(granted) == min(total, sum(wishes))
    assert budget.remaining == total - sum(granted)


def settle(pacer: StepPacer, cost, steps: int = 40, context: int = 0) -> list[int]:  # type: ignore[no-untyped-def]
    """Run steps that use the whole budget and take cost(tokens) seconds."""
    budgets = []
    for _ in range(steps):
        tokens = pacer.budget(context)
        budgets.append(tokens)
        pacer.record(tokens, cost(tokens), context)
    return budgets


@pytest.mark.parametrize(
    ("fixed", "per_token", "ideal"), [(0.0, 0.001, 288), (0.04, 0.001, 256), (0.1, 0.0001, 1024), (0.02, 0.01, 16)]
)
@pytest.mark.parametrize("start", [16, 128, None])
def test_the_budget_settles_where_a_step_takes_the_target_time(
    fixed: float, per_token: float, ideal: int, start: int | None
) -> None:
    pacer = StepPacer(1024, 0.3, start_tokens=start)
    last = settle(pacer, lambda n: fixed + per_token * n)[-5:]
    assert all(abs(n - ideal) <= 16 for n in last), last


def test_start_and_limits() -> None:
    assert StepPacer(2048, 0.3).budget() == 2048
    assert StepPacer(2048, 0.3, start_tokens=100).budget() == 96
    assert StepPacer(100, 0.3).budget() == 96
    assert StepPacer(2048, 0.3, min_tokens=40, start_tokens=16).budget() == 40


@given(st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 100), st.integers(0, 10_000)), max_size=30))
def test_the_budget_stays_in_bounds_whatever_is_recorded(steps: list[tuple[int, float, int]]) -> None:
    pacer = StepPacer(512, 0.3, min_tokens=24)
    for num_tokens, seconds, context in steps:
        pacer.record(num_tokens, seconds, context)
        budget = pacer.budget(context)
        assert budget == 24 or (24 < budget <= 512 and budget % 16 == 0)


def test_noise_moves_the_budget_little() -> None:
    noise = random.Random(7)
    pacer = StepPacer(2048, 0.3)
    last = settle(pacer, lambda n: (0.04 + 0.001 * n) * noise.uniform(0.8, 1.25), steps=200)[-100:]
    assert 170 <= min(last) <= max(last) <= 350


def test_one_hiccup_is_forgotten_and_a_lasting_change_is_followed() -> None:
    pacer = StepPacer(2048, 0.3)
    before = settle(pacer, lambda n: 0.001 * n)[-1]
    pacer.record(before, 30.0)
    assert pacer.budget() >= before // 2
    assert abs(settle(pacer, lambda n: 0.001 * n)[-1] - before) <= 16
    assert abs(settle(pacer, lambda n: 0.004 * n)[-1] - 64) <= 16


def test_steps_too_small_to_tell_anything_change_nothing() -> None:
    pacer = StepPacer(2048, 0.3)
    before = settle(pacer, lambda n: 0.001 * n)[-1]
    for _ in range(100):
        pacer.record(1, 0.2)
    assert pacer.budget() == before


def test_small_steps_do_not_promise_more_than_doubles_at_a_time() -> None:
    pacer = StepPacer(4096, 0.3, start_tokens=64)
    pacer.record(32, 1e-6)
    assert pacer.budget() <= 64


def test_a_longer_context_gets_a_smaller_budget_and_does_not_spoil_the_measure() -> None:
    def cost(context: int):  # type: ignore[no-untyped-def]
        return lambda n: 0.001 * n * (1 + context / 4096)

    pacer = StepPacer(2048, 0.3)
    short = settle(pacer, cost(0))[-1]
    assert abs(pacer.budget(4096) - short // 2) <= 16
    long = settle(pacer, cost(8192), context=8192)[-1]
    assert abs(long - short // 3) <= 16
    assert abs(pacer.budget(0) - short) <= 32


def test_speed_is_zero_until_measured_then_tokens_over_busy_time() -> None:
    meter = SpeedMeter()
    assert meter.rate() == 0.0
    meter.record(10, 0.0)
    assert meter.rate() == 0.0
    meter.record(30, 0.5)
    assert meter.rate() == 80.0


def test_speed_forgets_what_is_older_than_the_window_of_busy_time() -> None:
    meter = SpeedMeter(window_seconds=2.0)
    for _ in range(10):
        meter.record(100, 1.0)
    for _ in range(2):
        meter.record(4, 1.0)
    assert meter.rate() == pytest.approx(4.0)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.001, 5.0)), min_size=1, max_size=50))
def test_speed_lies_between_the_slowest_and_the_fastest_span(spans: list[tuple[int, float]]) -> None:
    meter = SpeedMeter(window_seconds=3.0)
    for tokens, seconds in spans:
        meter.record(tokens, seconds)
    rates = [tokens / seconds for tokens, seconds in spans]
    assert min(rates) * 0.999 - 1e-6 <= meter.rate() <= max(rates) * 1.001 + 1e-6
