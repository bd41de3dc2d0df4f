"""Decode policy, case by case."""

import pytest

from common.engine.block_pool import BlockPool
from decode_svc.request import Phase, Sequence
from decode_svc.scheduler import DecodeScheduler, Work
from tests.decode_svc.sequences import decoding, filling, make_job, remote

SIZE = 4


def scheduler_of(pool: BlockPool, *, max_batch_size: int = 16, watermark: int = 0) -> DecodeScheduler:
    # A little more than the share itself: the product is rounded down.
    share = (watermark + 0.5) / pool.num_blocks
    return DecodeScheduler(pool, max_batch_size=max_batch_size, watermark_share=share)


def never(sequence: Sequence) -> None:
    raise AssertionError(f"gave up {sequence.age}")


def plan(scheduler: DecodeScheduler, budget: int) -> list[tuple[int, int]]:
    """(order of the job, tokens) of each piece of work."""
    return [(w.sequence.job.order, w.end - w.start) for w in scheduler.plan(budget, never)]


class TestPlan:
    @pytest.mark.parametrize(
        ("budget", "expected"),
        [
            (100, [(1, 1), (3, 1), (0, 10), (2, 6)]),
            (16, [(1, 1), (3, 1), (0, 10), (2, 4)]),
            (12, [(1, 1), (3, 1), (0, 10)]),
            (5, [(1, 1), (3, 1), (0, 3)]),
            # Streams never wait for the budget.
            (2, [(1, 1), (3, 1)]),
            (1, [(1, 1), (3, 1)]),
        ],
    )
    def test_decodes_go_first_and_prompts_share_the_rest_oldest_first(
        self, budget: int, expected: list[tuple[int, int]]
    ) -> None:
        pool = BlockPool(32, SIZE)
        scheduler = scheduler_of(pool)
        filling(scheduler, pool, 2, 6)
        decoding(scheduler, pool, 3, 5)
        filling(scheduler, pool, 0, 10)
        decoding(scheduler, pool, 1, 5)
        assert plan(scheduler, budget) == expected

    def test_prompts_get_their_share_however_many_sequences_decode(self) -> None:
        pool = BlockPool(64, SIZE)
        scheduler = scheduler_of(pool)
        for order in range(12):
            decoding(scheduler, pool, order, 5)
        filling(scheduler, pool, 12, 10)
        assert plan(scheduler, 8) == [*((order, 1) for order in range(12)), (12, 2)]

    def test_logits_are_wanted_where_the_known_tokens_end(self) -> None:
        pool = BlockPool(32, SIZE)
        scheduler = scheduler_of(pool)
        prompt = filling(scheduler, pool, 0, 6)
        for count, wanted in [(4, False), (2, True)]:
            (work,) = scheduler.plan(count, never)
            assert (work.end - work.start, work.wants_logits) == (count, wanted)
            prompt.table.commit(prompt.tokens(work.start, work.end))

    def test_a_replayed_prompt_wants_no_logits(self) -> None:
        pool = BlockPool(32, SIZE)
        scheduler = scheduler_of(pool)
        prompt = filling(scheduler, pool, 0, 6)
        prompt.job.choices[0].output_ids = [1, 2]
        assert scheduler.plan(10, never) == [Work(prompt, 0, 6, wants_logits=False)]

    def test_the_youngest_gives_way_and_keeps_its_place(self) -> None:
        pool = BlockPool(7, SIZE)
        scheduler = scheduler_of(pool)
        oldest, middle, youngest = (decoding(scheduler, pool, order, 8) for order in range(3))
        scheduler.enqueue(make_job(pool, 9, 4).prompt)
        assert plan(scheduler, 10) == [(0, 1), (1, 1)]
        assert youngest.phase is Phase.WAITING and not youngest.table.blocks
        assert (oldest.phase, middle.phase) == (Phase.DECODING, Phase.DECODING)
        assert youngest.job.timings.preemptions == 1 == scheduler.num_preemptions
        # Ahead of the one that came later, though that one has waited longer.
        scheduler.remove(oldest)
        oldest.table.release()
        assert next(iter(scheduler.admissible())) is youngest

    def test_a_filling_prompt_is_preempted_before_an_older_decode(self) -> None:
        pool = BlockPool(4, SIZE)
        scheduler = scheduler_of(pool)
        decoding(scheduler, pool, 0, 8)
        prompt = filling(scheduler, pool, 1, 8)
        assert plan(scheduler, 10) == [(0, 1)]
        assert prompt.phase is Phase.WAITING

    def test_the_oldest_is_computed_even_when_all_others_must_go(self) -> None:
        pool = BlockPool(4, SIZE)
        scheduler = scheduler_of(pool)
        oldest = decoding(scheduler, pool, 0, 8)
        younger = [decoding(scheduler, pool, order, 4) for order in (1, 2)]
        for _ in range(8):
            (work,) = [work for work in scheduler.plan(10, never) if work.sequence is oldest]
            oldest.table.commit(oldest.tokens(work.start, work.end))
            oldest.output_ids.append(7)
        assert len(oldest.table.blocks) == 4
        assert all(sequence.phase is Phase.WAITING for sequence in younger)

    def test_a_young_one_preempts_itself_rather_than_an_older(self) -> None:
        pool = BlockPool(4, SIZE)
        scheduler = scheduler_of(pool)
        # The older one has room in its last block; only the younger wants a new one.
        older = decoding(scheduler, pool, 0, 6)
        younger = decoding(scheduler, pool, 1, 8)
        assert plan(scheduler, 10) == [(0, 1)]
        assert (older.phase, younger.phase) == (Phase.DECODING, Phase.WAITING)

    def test_remote_prompts_are_given_up_before_anything_running_youngest_first_one_at_a_time(self) -> None:
        pool = BlockPool(8, SIZE)
        scheduler = scheduler_of(pool)
        running = decoding(scheduler, pool, 0, 8)
        other = decoding(scheduler, pool, 1, 8)
        remote(scheduler, pool, 2, 8)
        youngest = remote(scheduler, pool, 3, 8)
        given_up: list[Sequence] = []

        def give_up(sequence: Sequence) -> None:
            given_up.append(sequence)
            assert sequence.job.transfer is not None
            sequence.job.transfer.abandoned = True

        assert scheduler.plan(10, give_up) == []
        assert scheduler.plan(10, give_up) == []
        assert given_up == [youngest]
        assert youngest.table.blocks, "its blocks may still be written"
        assert running.phase is other.phase is Phase.DECODING and scheduler.num_preemptions == 1

    def test_an_older_remote_prompt_is_not_given_up_for_a_younger_sequence(self) -> None:
        pool = BlockPool(6, SIZE)
        scheduler = scheduler_of(pool)
        oldest = remote(scheduler, pool, 0, 8)
        decoding(scheduler, pool, 1, 8)
        youngest = decoding(scheduler, pool, 2, 8)
        assert plan(scheduler, 10) == [(1, 1)]
        assert youngest.phase is Phase.WAITING and oldest.phase is Phase.REMOTE

    def test_a_remote_prompt_takes_a_seat_for_each_of_its_choices(self) -> None:
        pool = BlockPool(32, SIZE)
        scheduler = scheduler_of(pool, max_batch_size=4)
        scheduler.enqueue(make_job(pool, 0, 4, n=3).prompt)
        for sequence in scheduler.admissible():
            scheduler.set_remote(sequence)
        scheduler.enqueue(make_job(pool, 1, 4, n=2).prompt)
        assert list(scheduler.admissible()) == []

    def test_choices_of_one_request_are_as_old_as_their_index(self) -> None:
        pool = BlockPool(32, SIZE)
        scheduler = scheduler_of(pool)
        job = make_job(pool, 0, 4, n=3)
        for choice in reversed(job.choices):
            choice.output_ids.append(1)
            choice.table.reserve(5)
            choice.table.commit(choice.tokens(0, 4))
            scheduler.set_running(choice)
        assert [work.sequence.index for work in scheduler.plan(8, never)] == [0, 1, 2]


class TestAdmission:
    def admit(self, scheduler: DecodeScheduler) -> list[int]:
        admitted = []
        for sequence in scheduler.admissible():
            scheduler.set_running(sequence)
            admitted.append(sequence.job.order)
        return admitted

    def test_in_order_of_arrival_until_one_does_not_fit(self) -> None:
        pool = BlockPool(10, SIZE)
        scheduler = scheduler_of(pool)
        for order, length in [(2, 4), (0, 16), (1, 28), (3, 4)]:
            scheduler.enqueue(make_job(pool, order, length).prompt)
        assert self.admit(scheduler) == [0]
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 3)
        pool.check()

    @pytest.mark.parametrize(
        ("watermark", "num_decoding", "admitted"),
        [(0, 0, [5]), (2, 0, [5]), (0, 1, [5]), (2, 1, [5]), (3, 1, []), (0, 2, [5]), (0, 3, [])],
    )
    def test_room_to_grow_is_left_for_what_runs(self, watermark: int, num_decoding: int, admitted: list[int]) -> None:
        blocks_left = 2
        pool = BlockPool(num_decoding * 2 + 3 + blocks_left, SIZE)
        scheduler = scheduler_of(pool, watermark=watermark)
        for order in range(num_decoding):
            decoding(scheduler, pool, order, 8)
        scheduler.enqueue(make_job(pool, 5, 12).prompt)
        assert self.admit(scheduler) == admitted

    def test_what_needs_the_whole_pool_is_admitted_when_nothing_else_holds_blocks(self) -> None:
        pool = BlockPool(10, SIZE)
        scheduler = scheduler_of(pool, watermark=3)
        scheduler.enqueue(make_job(pool, 0, 40).prompt)
        assert self.admit(scheduler) == [0]

    @pytest.mark.parametrize(
        ("taken", "choices", "admitted"), [(0, 9, [5]), (1, 3, [5]), (1, 4, []), (3, 1, [5]), (4, 1, [])]
    )
    def test_a_prompt_needs_a_seat_for_each_choice(self, taken: int, choices: int, admitted: list[int]) -> None:
        pool = BlockPool(64, SIZE)
        scheduler = scheduler_of(pool, max_batch_size=4)
        for order in range(taken):
            remote(scheduler, pool, order, 4)
        scheduler.enqueue(make_job(pool, 5, 4, n=choices).prompt)
        assert self.admit(scheduler) == admitted

    def test_cached_blocks_of_the_prompt_are_pinned_and_not_counted_as_missing(self) -> None:
        pool = BlockPool(4, SIZE)
        scheduler = scheduler_of(pool)
        first = make_job(pool, 0, 12, first=12)
        first.prompt.table.reserve(12)
        first.prompt.table.commit(first.request.prompt_ids)
        second = make_job(pool, 1, 16, first=12)
        scheduler.enqueue(second.prompt)
        assert self.admit(scheduler) == [1]
        assert second.prompt.table.num_cached == 12
        assert second.prompt.num_pending == 4

    def test_what_is_not_admitted_holds_nothing(self) -> None:
        pool = BlockPool(6, SIZE)
        scheduler = scheduler_of(pool)
        running = decoding(scheduler, pool, 0, 16)
        blocked = make_job(pool, 1, 16)
        scheduler.enqueue(blocked.prompt)
        assert self.admit(scheduler) == []
        assert not blocked.prompt.table.blocks and pool.num_owned == len(running.table.blocks)

    def test_waiting_tokens_are_counted(self) -> None:
        pool = BlockPool(32, SIZE)
        scheduler = scheduler_of(pool)
        filling(scheduler, pool, 0, 10)
        decoding(scheduler, pool, 1, 9)
        remote(scheduler, pool, 2, 8)
        scheduler.enqueue(make_job(pool, 3, 7).prompt)
        assert scheduler.queued_tokens == 17
        assert (scheduler.num_running, scheduler.num_remote, scheduler.num_waiting) == (2, 1, 1)
