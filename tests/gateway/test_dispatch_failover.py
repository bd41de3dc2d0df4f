"""Fail-over: the client sees a pause, never a repeat, never a hole; and an end if nobody is left."""

import asyncio

import pytest

from common.errors import NoWorker
from common.pb.tandem.v1 import decode_pb2
from gateway.generation import TokenDelta
from tests.gateway.dispatching import collect, eventually, request, rig, tokens_of
from tests.gateway.fake_workers import Behaviour, FakeWorker, Run, answer_all, token


async def silent(run: Run) -> None:
    run.accept()


def expected(count: int, choice: int = 0) -> list[int]:
    return [token(choice, index) for index in range(count)]


async def read(generation: object, count: int) -> list[TokenDelta]:
    """Deltas until `count` tokens of choice 0 are there."""
    deltas: list[TokenDelta] = []
    while len(tokens_of(deltas)) < count:
        deltas.append(await anext(generation))  # type: ignore[call-overload]
    return deltas


async def test_killed_decode_worker_is_replaced_in_mid_stream() -> None:
    first, second = FakeWorker(worker_id="decode-0", behave=silent), FakeWorker(worker_id="decode-1")
    async with rig(first, second) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=8, n=2))
        run = await first.submitted.get()
        run.tokens(3)
        seen = await read(generation, 3)
        await first.crash()
        seen += await collect(generation)
        assert tokens_of(seen, 0) == expected(8, 0)
        assert tokens_of(seen, 1) == expected(8, 1)
        replay = second.runs[0].submit
        assert replay.attempt == 1
        assert [list(choice.output_ids) for choice in replay.choices] == [expected(3, 0), expected(3, 1)]
        assert not any(choice.finished for choice in replay.choices)
        assert generation.stats is not None
        assert generation.stats.output_tokens == 16
        parts.assert_clean()
        await parts.grants_returned()


@pytest.mark.parametrize(("lost", "taking_over", "cached"), [(9, 2, 1), (2, 9, 1), (0, 4, 6), (10, 0, 0)])
async def test_what_a_lost_worker_had_computed_is_not_cached(lost: int, taking_over: int, cached: int) -> None:
    """The next one finds it in the cache of the prefill worker that both asked."""
    first, second = (FakeWorker(worker_id=f"decode-{index}", behave=silent) for index in range(2))
    async with rig(first, second) as parts:
        generation = await parts.dispatcher.submit(request(prompt=range(10), max_tokens=4))
        run = await first.submitted.get()
        run.computed_tokens = lost
        run.tokens(2)
        seen = await read(generation, 2)
        await first.crash()
        run = await second.submitted.get()
        run.computed_tokens = taking_over
        run.tokens(2)
        run.finish()
        seen += await collect(generation)
        assert tokens_of(seen) == expected(4, 0)
        assert generation.stats is not None
        assert generation.stats.cached_tokens == cached
        assert generation.stats.details["computed_tokens"] == 10 - cached
        parts.assert_clean()


async def test_ended_choices_are_not_replayed() -> None:
    first, second = FakeWorker(worker_id="decode-0", behave=silent), FakeWorker(worker_id="decode-1")
    async with rig(first, second) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=8, n=3))
        run = await first.submitted.get()
        run.tokens(2)
        run.step(run.delta(1, 2, [token(1, 2)], last=True))
        seen = await read(generation, 2)
        while not any(delta.finish_reason for delta in seen):
            seen.append(await anext(generation))  # type: ignore[call-overload]
        generation.cancel_choice(2)
        await first.crash()
        seen += await collect(generation)
        replay = second.runs[0].submit
        assert [choice.finished for choice in replay.choices] == [False, True, True]
        assert tokens_of(seen, 0) == expected(8, 0)
        assert tokens_of(seen, 1) == expected(3, 1)
        assert tokens_of(seen, 2) == expected(2, 2)


async def test_failed_outcome_is_replayed_even_on_the_same_worker() -> None:
    async def fail_once(run: Run) -> None:
        run.accept()
        run.tokens(2)
        if run.submit.attempt == 0:
            run.finish(decode_pb2.OUTCOME_FAILED, "the engine stumbled")
        else:
            run.tokens(100)
            run.finish()

    worker = FakeWorker(behave=fail_once)
    async with rig(worker, patience=0.5) as parts:
        deltas = await collect(await parts.dispatcher.submit(request(max_tokens=6)))
        assert tokens_of(deltas) == expected(6)
        assert [run.submit.attempt for run in worker.runs] == [0, 1]


async def test_attempts_are_bounded() -> None:
    async def always_fail(run: Run) -> None:
        run.accept()
        run.finish(decode_pb2.OUTCOME_FAILED, "poison")

    workers = [FakeWorker(worker_id=f"decode-{i}", behave=always_fail) for i in range(2)]
    async with rig(*workers, max_attempts=3) as parts:
        with pytest.raises(NoWorker, match="3 attempts: poison"):
            await collect(await parts.dispatcher.submit(request()))
        assert sum(len(worker.runs) for worker in workers) == 3
        assert all(worker.runs for worker in workers), "the second attempt must go to the other worker"
        parts.assert_clean()
        await parts.grants_returned()


async def never(run: Run) -> None:
    """Takes it and does not answer."""


async def full(run: Run) -> None:
    run.shortage()


@pytest.mark.parametrize("second", [never, full])
async def test_choices_cancelled_between_two_tries_end_the_request_well(second: Behaviour) -> None:
    """The last worker to be tried is being connected to; what was tried before is nobody's attempt any more."""
    workers = [FakeWorker(worker_id=f"decode-{i}", behave=b) for i, b in enumerate((fail_late, second, answer_all))]
    first, broken, slow = workers
    slow.greets.clear()
    async with rig(*workers) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=8, n=2))
        run = await first.submitted.get()
        run.tokens(2)
        seen = await read(generation, 2)
        run.finish(decode_pb2.OUTCOME_FAILED, "stumbled")
        await broken.submitted.get()
        if second is never:
            await broken.crash()
        await eventually(lambda: slow.streams)
        for choice in (0, 1):
            generation.cancel_choice(choice)
        assert {delta.choice for delta in await collect(generation)} <= {1}
        slow.greets.set()
        assert tokens_of(seen) == expected(2)
        assert generation.stats is not None
        assert not slow.runs
        await generation.aclose()
        parts.assert_clean()
        await parts.grants_returned()


async def test_choices_cancelled_on_a_worker_that_then_breaks_go_nowhere_else() -> None:
    workers = [FakeWorker(worker_id=f"decode-{i}", behave=b) for i, b in enumerate((fail_late, never, answer_all))]
    first, broken, idle = workers
    async with rig(*workers) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=8))
        run = await first.submitted.get()
        run.tokens(2)
        await read(generation, 2)
        run.finish(decode_pb2.OUTCOME_FAILED, "stumbled")
        asked = await broken.submitted.get()
        generation.cancel_choice(0)
        await eventually(lambda: 0 in asked.cancelled_choices)
        await broken.crash()
        assert await collect(generation) == []
        assert generation.stats is not None
        assert not idle.runs
        parts.assert_clean()


async def fail_late(run: Run) -> None:
    """Accepts the first attempt and nothing later."""
    if run.submit.attempt == 0:
        run.accept()
    else:
        run.shortage()


async def test_no_worker_left_is_an_error_after_what_was_buffered() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker, patience=0.2) as parts:
        generation = await parts.dispatcher.submit(request())
        run = await worker.submitted.get()
        run.tokens(2)
        await eventually(lambda: generation.output_tokens == 2)  # type: ignore[attr-defined]
        await worker.crash()
        assert tokens_of(await read(generation, 2)) == expected(2)
        with pytest.raises(NoWorker):
            await collect(generation)
        assert generation.stats is None
        parts.assert_clean()


async def test_worker_restarted_under_its_address_takes_over() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=5))
        (await worker.submitted.get()).tokens(2)
        seen = await read(generation, 2)
        await worker.crash()
        await worker.start()
        run = await asyncio.wait_for(worker.submitted.get(), 15)
        run.tokens(10)
        run.finish()
        seen += await collect(generation)
        assert tokens_of(seen) == expected(5)
        assert run.submit.attempt == 1


async def test_stale_and_repeated_deltas_are_dropped() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=6))
        run = await worker.submitted.get()
        run.tokens(3)
        stale = run.delta(0, 3, [666])
        stale.attempt = 5
        stranger = run.delta(0, 3, [667])
        stranger.request_id = "somebody else"
        run.step(stale, stranger, run.delta(0, 1, [token(0, 1), token(0, 2), token(0, 3)]))
        run.counts[0] = 4
        run.tokens(10)
        run.finish()
        assert tokens_of(await collect(generation)) == expected(6)


async def test_a_gap_is_a_failed_attempt_not_a_hole() -> None:
    first, second = FakeWorker(worker_id="decode-0", behave=silent), FakeWorker(worker_id="decode-1")
    async with rig(first, second) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=6))
        run = await first.submitted.get()
        run.tokens(2)
        run.step(run.delta(0, 4, [token(0, 4)]))
        assert tokens_of(await collect(generation)) == expected(6)
        await asyncio.wait_for(run.cancelled.wait(), 10)
        assert len(second.runs) == 1


async def test_worker_that_dies_between_last_token_and_summary_still_ends_well() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker, patience=0.2) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=2))
        (await worker.submitted.get()).tokens(2)
        seen = await read(generation, 2)
        await worker.crash()
        seen += await collect(generation)
        assert tokens_of(seen) == expected(2)
        assert generation.stats is not None
        assert generation.stats.output_tokens == 2


async def test_dispatch_survives_a_worker_that_dies_before_it_answers() -> None:
    async def never(run: Run) -> None:
        return None

    first, second = FakeWorker(worker_id="decode-0", behave=never), FakeWorker(worker_id="decode-1")
    async with rig(first, second) as parts:
        submitting = asyncio.create_task(parts.dispatcher.submit(request()))
        await first.submitted.get()
        await first.crash()
        assert tokens_of(await collect(await submitting)) == expected(4)
