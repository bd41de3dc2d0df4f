"""Prefill policy, case by case."""

import pytest

from common.engine.block_pool import BlockPool
from common.engine.block_table import BlockTable
from common.engine.scheduling import TokenBudget
from common.hashing import block_hashes
from common.sampling import SamplingParams
from prefill_svc.request import PrefillJob, PrefillRequest
from prefill_svc.scheduler import PrefillScheduler

SIZE = 4


def make_job(pool: BlockPool, number: int, length: int, shared: int = 0) -> PrefillJob:
    """A job whose prompt differs from all others' after its first `shared` tokens."""
    prompt = tuple(range(shared)) + tuple(1000 * (number + 1) + i for i in range(length - shared))
    request = PrefillRequest("d", number, f"r{number}", prompt, 0, (0,), SamplingParams(), "", "")
    return PrefillJob(request, BlockTable(pool, ""), block_hashes(prompt, pool.block_size), arrived=0.0)


def admit(scheduler: PrefillScheduler) -> list[int]:
    return [job.request.transfer_id for job in scheduler.admit()]


@pytest.mark.parametrize(
    ("lengths", "blocks", "seats", "admitted"),
    [
        ([8, 8, 8], 6, 9, [0, 1, 2]),
        ([8, 8, 8], 5, 9, [0, 1]),
        # In order: the small one behind the large one waits with it.
        ([8, 16, 4], 5, 9, [0]),
        ([8, 8, 8], 6, 2, [0, 1]),
        ([20], 5, 9, [0]),
        ([], 5, 9, []),
    ],
)
def test_prompts_that_fit_whole_are_admitted_in_order(
    lengths: list[int], blocks: int, seats: int, admitted: list[int]
) -> None:
    pool = BlockPool(blocks, SIZE)
    scheduler = PrefillScheduler(max_batch_size=seats)
    jobs = [make_job(pool, number, length) for number, length in enumerate(lengths)]
    for job in jobs:
        scheduler.add(job)
    assert admit(scheduler) == admitted
    assert (scheduler.num_running, scheduler.num_waiting) == (len(admitted), len(lengths) - len(admitted))
    for number, job in enumerate(jobs):
        assert len(job.table.blocks) == (-(-lengths[number] // SIZE) if number in admitted else 0)


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [
        (30, [(0, 0, 10), (1, 0, 6), (2, 0, 8)]),
        (18, [(0, 0, 10), (1, 0, 6), (2, 0, 2)]),
        (16, [(0, 0, 10), (1, 0, 6)]),
        (4, [(0, 0, 4)]),
        (0, []),
    ],
)
def test_the_budget_is_spent_oldest_first(budget: int, chunks: list[tuple[int, int, int]]) -> None:
    pool = BlockPool(32, SIZE)
    scheduler = PrefillScheduler(max_batch_size=8)
    for number, length in enumerate([10, 6, 8]):
        scheduler.add(make_job(pool, number, length))
    admit(scheduler)
    found = scheduler.next_chunks(TokenBudget(budget))
    assert [(c.job.request.transfer_id, c.start, c.end) for c in found] == chunks


def test_a_chunk_starts_where_the_last_one_ended_and_the_last_one_says_so() -> None:
    pool = BlockPool(32, SIZE)
    scheduler = PrefillScheduler(max_batch_size=8)
    job = make_job(pool, 0, 10)
    scheduler.add(job)
    admit(scheduler)
    seen = []
    for _ in range(3):
        (chunk,) = scheduler.next_chunks(TokenBudget(4))
        job.table.commit(job.request.prompt_ids[chunk.start : chunk.end])
        seen.append((chunk.start, chunk.end, chunk.last))
    assert seen == [(0, 4, False), (4, 8, False), (8, 10, True)]


def test_a_cached_prefix_is_neither_computed_nor_reserved_again() -> None:
    pool = BlockPool(5, SIZE)
    scheduler = PrefillScheduler(max_batch_size=8)
    first, second = make_job(pool, 0, 12, shared=12), make_job(pool, 1, 18, shared=12)
    scheduler.add(first)
    admit(scheduler)
    first.table.commit(first.request.prompt_ids)
    # All computed; its blocks stay until its KV is sent.
    scheduler.remove(first)
    scheduler.add(second)
    assert admit(scheduler) == [1]
    (chunk,) = scheduler.next_chunks(TokenBudget(50))
    assert (chunk.start, chunk.end) == (12, 18)
    assert second.table.blocks[:3] == first.table.blocks


def test_removing_frees_the_seat_and_the_count() -> None:
    pool = BlockPool(32, SIZE)
    scheduler = PrefillScheduler(max_batch_size=1)
    jobs = [make_job(pool, number, 8) for number in range(3)]
    for job in jobs:
        scheduler.add(job)
    admit(scheduler)
    assert scheduler.queued_tokens == 24
    scheduler.remove(jobs[0])
    scheduler.remove(jobs[1])
    scheduler.remove(jobs[1])
    assert admit(scheduler) == [2]
    assert scheduler.queued_tokens == 8
