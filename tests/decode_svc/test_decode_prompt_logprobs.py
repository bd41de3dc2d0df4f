"""Prompt log probabilities on the decode engine, case by case: local, remote, after losses, preemption and cancels.

The harness demands at every delta that all of them are there, and of each that it continues the one before.
"""

from typing import Any

import pytest

from common.sampling import SamplingParams
from decode_svc.messages import Cancel, FirstArrived, PromptLogprobsArrived
from decode_svc.request import ChoicePrefix, Outcome
from tests.decode_svc.harness import DecodeHarness, Told
from tests.decode_svc.requests import P1, P2, prompt, remote_number, request
from tests.factories.engines import first_tokens, prompt_scores


def scored(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "prompt_logprobs": 2} | fields))


def plain(**fields: Any) -> SamplingParams:
    return scored(prompt_logprobs=None, **fields)


def assert_whole(told: Told) -> None:
    assert told.outcome() is Outcome.OK
    assert told.scores == told.scores_wanted
    assert len(told.scores) == len(told.request.prompt_ids) - 1


class TestLocal:
    @pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 30])
    @pytest.mark.parametrize("n", [1, 3])
    def test_prompts_around_block_and_chunk_edges(self, length: int, n: int) -> None:
        harness = DecodeHarness(budget=3)
        told = harness.submit(request(length=length, n=n, params=scored()))
        harness.finish()
        assert_whole(told)

    @pytest.mark.parametrize("num_top", [0, 1, 5])
    def test_as_many_as_asked_for(self, num_top: int) -> None:
        harness = DecodeHarness()
        told = harness.submit(request(params=scored(prompt_logprobs=num_top)))
        harness.finish()
        assert_whole(told)
        assert all(len(entry.top) == num_top for entry in told.scores)

    def test_strangers_in_the_batch_change_nothing(self) -> None:
        harness = DecodeHarness(budget=7)
        told = [
            harness.submit(request(f"r{i}", prompt_ids=prompt(11 + i, seed=i), params=scored() if i % 2 else plain()))
            for i in range(6)
        ]
        harness.finish()
        for index, one in enumerate(told):
            assert len(one.scores) == (10 + index if index % 2 else 0)

    def test_a_warm_cache_is_not_read_and_can_be_read_afterwards(self) -> None:
        harness = DecodeHarness()
        cold = harness.submit(request("cold", length=17, params=plain()))
        harness.finish()
        told = harness.submit(request("scored", length=17, params=scored()))
        harness.finish()
        warm = harness.submit(request("warm", length=17, params=plain()))
        harness.finish()
        assert_whole(told)
        assert cold.tokens == told.tokens == warm.tokens
        assert told.finished is not None and warm.finished is not None
        timings = told.finished.timings
        assert (timings.decode_cached_tokens, timings.computed_tokens) == (0, 17)
        assert warm.finished.timings.decode_cached_tokens == 16
        assert harness.engine.snapshot.figures.tokens_cached == 16

    def test_a_scored_prompt_warms_the_cache(self) -> None:
        harness = DecodeHarness()
        harness.submit(request("scored", length=17, params=scored()))
        harness.finish()
        warm = harness.submit(request("warm", length=17, params=plain()))
        harness.finish()
        assert warm.finished is not None and warm.finished.timings.decode_cached_tokens == 16

    def test_known_output_does_not_keep_the_prompt_from_being_scored(self) -> None:
        harness = DecodeHarness(budget=4)
        fresh = harness.submit(request("fresh", n=2, params=scored(max_tokens=8)))
        harness.finish()
        known = tuple(fresh.tokens[0][:5])
        choices = (ChoicePrefix(known), ChoicePrefix(tuple(fresh.tokens[1]), finished=True))
        told = harness.submit(request("replay", attempt=1, choices=choices, params=scored(max_tokens=8)))
        harness.finish()
        assert_whole(told)


class TestPreemption:
    def test_a_prompt_that_loses_its_blocks_is_scored_once(self) -> None:
        # The old request grows into the blocks of the young one, whose prompt is half computed by then.
        harness = DecodeHarness(num_blocks=10, block_size=4, budget=2)
        harness.submit(request("old", length=14, params=plain(max_tokens=20)))
        for _ in range(6):
            harness.step()
        young = harness.submit(request("young", prompt_ids=prompt(20, seed=1), params=scored()))
        while not harness.engine.snapshot.preemptions:
            assert harness.step(), "all is computed, and nothing was preempted"
        assert 0 < len(young.scores) < 19
        harness.finish()
        assert_whole(young)
        # In chunks of a token or two; the last of those that were known goes along with the first new one at most.
        assert sum(len(chunk.targets) for call in harness.runner.calls for chunk in call) <= 19 + 1

    def test_preempted_choices_are_recomputed_without_scores(self) -> None:
        harness = DecodeHarness(num_blocks=12, block_size=4, max_request_tokens=40)
        told = [
            harness.submit(request(f"r{i}", prompt_ids=prompt(10, seed=i), params=scored(max_tokens=28)))
            for i in range(2)
        ]
        harness.finish()
        assert harness.engine.snapshot.preemptions > 0
        for one in told:
            assert_whole(one)
        targets = sum(len(chunk.targets) for call in harness.runner.calls for chunk in call)
        assert targets == sum(len(one.scores) for one in told)


class TestRemote:
    @pytest.mark.parametrize("length", [2, 5, 16, 30])
    @pytest.mark.parametrize("n", [1, 2])
    def test_they_are_those_of_a_local_prefill(self, length: int, n: int) -> None:
        told = []
        for peers in ([], [P1.address]):
            harness = DecodeHarness(peers=peers)
            told.append(harness.submit(request(length=length, n=n, params=scored(), prefill_targets=(P1,))))
            harness.finish()
            assert len(harness.remotes) == len(peers)
            assert_whole(told[-1])
        assert told[0].scores == told[1].scores and told[0].tokens == told[1].tokens

    def test_the_whole_prompt_is_asked_for_whatever_is_cached(self) -> None:
        harness = DecodeHarness(peers=[P1.address])
        harness.submit(request("cold", length=17, params=plain()))
        harness.finish()
        told = harness.submit(request("scored", length=17, params=scored(), prefill_targets=(P1,)))
        harness.step()
        run = remote_number(harness, 0).run
        assert (run.first_token, run.params.prompt_logprobs) == (0, 2)
        harness.finish()
        assert_whole(told)
        assert told.finished is not None and told.finished.timings.decode_cached_tokens == 0

    @pytest.mark.parametrize("before", [0, 5, 29])
    def test_a_second_prefill_worker_begins_again_and_nothing_is_told_twice(self, before: int) -> None:
        harness = DecodeHarness(peers=[P1.address, P2.address])
        told = harness.submit(request(length=30, params=scored(), prefill_targets=(P1, P2)))
        harness.step()
        first = remote_number(harness, 0)
        harness.send_scores(first, before)
        harness.send_terminal(first, ok=False)
        harness.pass_events()
        harness.step()
        assert len(told.scores) == before
        run = remote_number(harness, 1).run
        # Those that are complete are not computed once more.
        assert run.params.prompt_logprobs == (2 if before < 29 else None)
        harness.finish()
        assert_whole(told)

    def test_local_prefill_goes_on_after_the_last_prefill_worker_is_lost(self) -> None:
        harness = DecodeHarness(peers=[P1.address], budget=4)
        told = harness.submit(request(length=30, params=scored(), prefill_targets=(P1,)))
        harness.step()
        harness.send_scores(remote_number(harness, 0), 10)
        harness.send_terminal(remote_number(harness, 0), ok=False)
        harness.finish()
        assert_whole(told)
        # What the gateway has is not scored again, but for the rest of the chunk in which it ends.
        assert sum(len(chunk.targets) for call in harness.runner.calls for chunk in call) == 29 - 8

    def test_complete_scores_let_the_cache_be_read_again(self) -> None:
        harness = DecodeHarness(peers=[P1.address])
        harness.submit(request("warm", length=17, params=plain()))
        harness.finish()
        told = harness.submit(request(length=17, params=scored(), prefill_targets=(P1,)))
        harness.step()
        harness.send_scores(remote_number(harness, 0), 16)
        harness.send_terminal(remote_number(harness, 0), ok=False)
        harness.runner.calls.clear()
        harness.finish()
        assert_whole(told)
        assert len(harness.runner.calls[0][0].token_ids) == 1

    @pytest.mark.parametrize("first_position", [0, 2, 7, 16])
    def test_what_does_not_fit_is_never_told_and_fails_the_prefill_worker(self, first_position: int) -> None:
        """A hole, or more than there are; the position before the first."""
        harness = DecodeHarness(peers=[P1.address])
        told = harness.submit(request(length=17, params=scored(), prefill_targets=(P1,)))
        harness.step()
        transfer_id = remote_number(harness, 0).run.transfer_id
        entries = prompt_scores(told.request.prompt_ids, 2)
        harness.engine.handle(PromptLogprobsArrived(transfer_id, first_position, entries))
        assert told.scores == []
        assert [cancel.transfer_id for cancel in harness.cancels] == [transfer_id]
        harness.finish()
        assert_whole(told)
        assert told.finished is not None and told.finished.timings.prefill_retries == 1

    def test_tokens_before_the_scores_fail_the_prefill_worker(self) -> None:
        harness = DecodeHarness(peers=[P1.address])
        told = harness.submit(request(length=17, params=scored(), prefill_targets=(P1,)))
        harness.step()
        remote = remote_number(harness, 0)
        harness.send_scores(remote, 15)
        harness.send_first(remote)
        assert told.tokens == [[]]
        assert len(harness.cancels) == 1
        harness.finish()
        assert_whole(told)

    def test_a_prompt_without_its_scores_is_not_done(self) -> None:
        """All else went well: no first token was wanted, the KV landed. The scores are computed here."""
        harness = DecodeHarness(peers=[P1.address])
        tokens = first_tokens(prompt(17), scored(), [0])
        choices = (ChoicePrefix((tokens[0][1].token_id,)),)
        told = harness.submit(request(length=17, choices=choices, params=scored(), prefill_targets=(P1,)))
        harness.step()
        remote = remote_number(harness, 0)
        harness.land(remote, 17)
        harness.send_terminal(remote, ok=True)
        harness.pass_events()
        harness.finish()
        assert_whole(told)

    def test_unasked_for_scores_are_dropped(self) -> None:
        harness = DecodeHarness(peers=[P1.address])
        told = harness.submit(request(length=17, params=plain(), prefill_targets=(P1,)))
        harness.step()
        run = remote_number(harness, 0).run
        harness.engine.handle(PromptLogprobsArrived(run.transfer_id, 1, prompt_scores(run.prompt_ids, 1)))
        harness.finish()
        assert told.scores == [] and told.outcome() is Outcome.OK

    @pytest.mark.parametrize("choice", [None, 0])
    @pytest.mark.parametrize("count", [0, 3, 16])
    def test_a_cancel_among_them_ends_everything(self, choice: int | None, count: int) -> None:
        harness = DecodeHarness(peers=[P1.address])
        told = harness.submit(request(length=17, params=scored(), prefill_targets=(P1,)))
        harness.step()
        remote = remote_number(harness, 0)
        harness.send_scores(remote, count)
        told.cancelled, told.cancelled_choices = choice is None, {0} if choice == 0 else set()
        harness.engine.handle(Cancel("r", 0, choice))
        harness.send_scores(remote, 17)
        harness.engine.handle(FirstArrived(remote.run.transfer_id, first_tokens(prompt(17), scored(), [0])))
        harness.finish()
        assert len(told.scores) == count and told.tokens == [[]]


def test_long_ones_leave_in_bounded_parts() -> None:
    harness = DecodeHarness(num_blocks=400, block_size=4, budget=1500)
    told = harness.submit(request(length=1300, params=scored(max_tokens=1, prompt_logprobs=0)))
    sizes: list[int] = []
    take = harness.engine._emit
    harness.engine._emit = lambda outputs: (  # type: ignore[method-assign]
        sizes.extend(len(o.entries) for o in outputs if hasattr(o, "entries")),
        take(outputs),
    )[1]
    harness.finish()
    assert_whole(told)
    assert sizes == [512, 512, 275]
