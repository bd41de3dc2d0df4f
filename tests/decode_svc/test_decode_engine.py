"""The decode engine, case by case: what the machine test covers by chance is told here by name."""

from dataclasses import replace
from typing import Any

import pytest

from common.engine.grammar import GrammarState
from common.sampling import FinishReason, SamplingParams
from decode_svc.messages import Cancel, FirstArrived, PrefillProgressed, RejectedOut, ShortageOut, StreamGone
from decode_svc.request import ChoicePrefix, DecodeRequest, Outcome, PrefillTarget
from tests.decode_svc.harness import DecodeHarness, Remote, Told
from tests.factories.engines import VOCAB, compile_regex, first_tokens, next_token, reference
from tests.factories.grammars import UnreliableMasks

LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
P1, P2 = PrefillTarget("p1", "p1:1"), PrefillTarget("p2", "p2:1")


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 7 + i * 5) % (VOCAB - 2) + 2 for i in range(length))


def request(name: str = "r", length: int = 10, n: int = 1, **fields: Any) -> DecodeRequest:
    values: dict[str, Any] = {
        "stream": "s",
        "attempt": 0,
        "prompt_ids": prompt(length),
        "choices": (ChoicePrefix(),) * n,
        "params": LONG,
    }
    return DecodeRequest(request_id=name, **(values | fields))


def only_remote(harness: DecodeHarness) -> Remote:
    (remote,) = harness.remotes.values()
    return remote


class TestAnswers:
    def test_a_duplicate_is_rejected_and_the_first_goes_on(self) -> None:
        harness = DecodeHarness()
        first = harness.submit(request())
        harness.told = {}
        second = harness.submit(request())
        assert isinstance(second.answers[0], RejectedOut) and second.answers[0].field == "request_id"
        harness.told = {first.request.key: first}
        harness.finish()

    def test_another_attempt_is_another_request(self) -> None:
        harness = DecodeHarness()
        assert harness.submit(request()).accepted and harness.submit(request(attempt=1)).accepted
        harness.finish()

    def test_what_never_fits_is_rejected_by_field(self) -> None:
        harness = DecodeHarness(num_blocks=4, block_size=4)
        told = harness.submit(request(length=16))
        assert isinstance(told.answers[0], RejectedOut) and told.answers[0].field == "prompt_ids"
        assert harness.submit(request("fits", length=15)).accepted
        harness.finish()

    def test_a_full_queue_and_a_drain_are_shortages(self) -> None:
        harness = DecodeHarness(max_waiting=1)
        harness.submit(request("a"))
        for told in (harness.submit(request("b")), harness.submit(request("c"), draining=True)):
            assert isinstance(told.answers[0], ShortageOut) and told.answers[0].retry_after > 0
        harness.step()
        assert harness.submit(request("d")).accepted
        harness.finish()

    def test_accepted_is_told_before_anything_is_computed(self) -> None:
        harness = DecodeHarness()
        assert harness.submit(request()).accepted
        assert harness.runner.calls == []


class TestTokens:
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
    @pytest.mark.parametrize("n", [1, 3])
    def test_prompts_around_block_edges(self, length: int, n: int) -> None:
        harness = DecodeHarness(budget=3)
        harness.submit(request(length=length, n=n, params=SamplingParams(seed=4, max_tokens=9, logprobs=1)))
        harness.finish()

    def test_log_probabilities_come_with_the_tokens(self) -> None:
        harness = DecodeHarness()
        told = harness.submit(request(params=SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)))
        harness.finish()
        for index, token in enumerate(told.sampled[0]):
            assert token == next_token(told.request.prompt_ids, told.tokens[0][:index], told.request.params, 0)
            assert token.logprobs is not None and len(token.logprobs.top) == 2

    def test_a_warm_cache_changes_nothing_but_the_work(self) -> None:
        harness = DecodeHarness()
        first = harness.submit(request("a", length=17))
        harness.finish()
        computed = sum(len(c.token_ids) for call in harness.runner.calls for c in call)
        harness.runner.calls.clear()
        second = harness.submit(request("b", length=17))
        harness.finish()
        assert second.tokens == first.tokens
        assert sum(len(c.token_ids) for call in harness.runner.calls for c in call) == computed - 16
        assert second.finished is not None and second.finished.timings.decode_cached_tokens == 16

    def test_an_answer_stays_cached_for_the_next_turn(self) -> None:
        harness = DecodeHarness()
        first = harness.submit(request("a", length=10))
        harness.finish()
        turn = (*first.request.prompt_ids, *first.tokens[0], 3, 4)
        second = harness.submit(request("b", prompt_ids=turn))
        harness.finish()
        # All but the last token of the answer was computed: 21 tokens, five full blocks.
        assert second.finished is not None and second.finished.timings.decode_cached_tokens == 20

    def test_another_salt_shares_nothing(self) -> None:
        harness = DecodeHarness()
        for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
            told = harness.submit(request(name, length=17, cache_salt=salt))
            harness.finish()
            assert told.finished is not None
            assert told.finished.timings.decode_cached_tokens == (16 if name == "c" else 0)

    def test_choices_share_the_prompts_full_blocks(self) -> None:
        harness = DecodeHarness()
        harness.submit(request(length=10, n=3))
        while harness.engine.snapshot.figures.tokens_decoded < 3:
            harness.step()
        # Two full prompt blocks, and each choice's own third.
        assert harness.engine.snapshot.owned == 5
        harness.finish()

    def test_the_longest_context_ends_a_choice(self) -> None:
        harness = DecodeHarness(max_request_tokens=14)
        told = harness.submit(request(length=10, params=SamplingParams(max_tokens=50, ignore_eos=True)))
        harness.finish()
        assert len(told.tokens[0]) == 4 and told.reasons == {0: FinishReason.LENGTH}

    def test_a_replay_forces_what_was_said_and_keeps_finished_choices(self) -> None:
        harness = DecodeHarness(budget=3)
        outputs = [reference(prompt(10), LONG, i, harness.max_request_tokens)[0] for i in range(3)]
        choices = (ChoicePrefix(tuple(outputs[0][:7])), ChoicePrefix(), ChoicePrefix(tuple(outputs[2]), finished=True))
        told = harness.submit(request(choices=choices, attempt=1))
        harness.finish()
        assert told.tokens == outputs
        assert set(told.reasons) == {0, 1}
        assert told.finished is not None and told.finished.output_tokens == sum(map(len, outputs))

    def test_preemption_changes_no_token(self) -> None:
        harness = DecodeHarness(num_blocks=8, block_size=4, max_request_tokens=30)
        params = SamplingParams(max_tokens=18, ignore_eos=True, seed=1)
        for index in range(3):
            harness.submit(request(f"r{index}", prompt_ids=prompt(6, index), params=params))
        harness.finish()
        assert harness.engine.snapshot.preemptions > 0
        order = [told.finished for told in harness.told.values()]
        assert order[0] is not None and order[0].timings.preemptions == 0, "the oldest gave way"

    def test_what_a_preempted_prompt_had_computed_itself_is_not_cached(self) -> None:
        # The old request grows into the blocks of the young one, whose prompt is half computed by then.
        harness = DecodeHarness(num_blocks=10, block_size=4, budget=2)
        harness.submit(request("old", length=14, params=SamplingParams(max_tokens=20, ignore_eos=True)))
        for _ in range(6):
            harness.step()
        young = harness.submit(request("young", prompt_ids=prompt(20, seed=1)))
        harness.finish()
        assert young.finished is not None and young.finished.timings.preemptions > 0
        # In the second call it finds blocks of the first one.
        assert harness.engine.snapshot.figures.tokens_cached > 0
        assert (young.finished.timings.decode_cached_tokens, young.finished.timings.computed_tokens) == (0, 20)


class TestRemotePrefill:
    def test_the_missing_part_is_asked_for_and_the_first_token_needs_no_compute(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        harness.submit(request("warm", length=9))
        harness.finish()
        harness.runner.calls.clear()
        told = harness.submit(request(length=17, prefill_targets=(P1,), traceparent="tp", cache_salt=""))
        harness.step()
        run = only_remote(harness).run
        assert (run.first_token, run.first_choices, run.target, run.traceparent) == (8, (0,), P1, "tp")
        only_remote(harness).cached = 4
        harness.land(only_remote(harness), 100)
        harness.send_first(only_remote(harness))
        assert told.tokens[0] and harness.runner.calls == []
        harness.send_terminal(only_remote(harness), ok=True)
        harness.finish()
        assert told.finished is not None
        timings = told.finished.timings
        assert (timings.prefill_worker, timings.prefill_cached_tokens, timings.computed_tokens) == ("p1", 4, 13)
        assert (timings.transfer_messages, timings.transfer_bytes) == (9, 9 * 64)
        # Only what was decoded: the last output token is never computed.
        assert [len(c.token_ids) for call in harness.runner.calls for c in call] == [1] * (len(told.tokens[0]) - 1)

    def test_figures_of_a_request_that_ends_with_its_first_token(self) -> None:
        """Its stop string is met while the KV still travels: the prefill worker's last word comes too late."""
        harness = DecodeHarness(peers=["p1:1"])
        told = harness.submit(request(length=17, prefill_targets=(P1,)))
        harness.step()
        run = only_remote(harness).run
        tokens = first_tokens(run.prompt_ids, run.params, run.first_choices)
        harness.engine.handle(FirstArrived(run.transfer_id, tokens, cached_tokens=4))
        told.cancelled_choices.add(0)
        harness.engine.handle(Cancel(told.request.request_id, told.request.attempt, choice=0))
        harness.send_terminal(only_remote(harness), ok=False)
        harness.finish()
        assert told.finished is not None and told.finished.outcome is Outcome.OK
        timings = told.finished.timings
        assert (timings.prefill_cached_tokens, timings.computed_tokens) == (4, 13)

    def test_figures_of_a_lost_worker_are_not_those_of_the_one_that_took_over(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        told = harness.submit(request(length=17, prefill_targets=(P1,)))
        harness.step()
        run = only_remote(harness).run
        tokens = first_tokens(run.prompt_ids, run.params, run.first_choices)
        harness.engine.handle(FirstArrived(run.transfer_id, tokens, cached_tokens=4))
        harness.send_terminal(only_remote(harness), ok=False)
        harness.finish()
        assert told.finished is not None
        timings = told.finished.timings
        assert (timings.prefill_worker, timings.prefill_cached_tokens, timings.computed_tokens) == ("decode-0", 0, 17)

    @pytest.mark.parametrize("late", [False, True])
    def test_what_was_computed_for_an_attempt_that_was_given_up_is_not_cached(self, late: bool) -> None:
        """Its blocks were wanted before any first token; asked again, the worker finds its own work in its cache."""
        harness = DecodeHarness(peers=["p1:1"])
        told = harness.submit(request(length=17, prefill_targets=(P1,)))
        harness.step()
        first = only_remote(harness)
        first.cached, first.computed = 4, 8
        harness.engine._give_up(harness.engine._jobs[told.request.key].prompt)
        if not late:
            harness.send_terminal(first, ok=False)
        harness.pass_events()
        harness.step()
        if late:
            harness.send_terminal(first, ok=False)
        again = list(harness.remotes.values())[-1]
        again.cached = 12
        harness.finish()
        assert told.finished is not None
        timings = told.finished.timings
        assert (timings.prefill_worker, timings.prefill_cached_tokens, timings.computed_tokens) == ("p1", 12, 13)

    @pytest.mark.parametrize(
        ("first", "second", "computed"),
        [
            ((0, 8), (12, 5), 13),  # what lies between was cached for the second and not computed by the first
            ((8, 9), (4, 13), 13),
            ((4, 13), (8, 9), 13),
            ((0, 0), (16, 1), 1),  # lost without a word
        ],
    )
    @pytest.mark.parametrize("n", [1, 2])
    def test_what_two_workers_computed_counts_once(
        self, first: tuple[int, int], second: tuple[int, int], computed: int, n: int
    ) -> None:
        harness = DecodeHarness(peers=["p1:1", "p2:1"])
        told = harness.submit(request(length=17, n=n, prefill_targets=(P1, P2)))
        harness.step()
        lost = only_remote(harness)
        lost.cached, lost.computed = first
        if sum(first) == 17:
            harness.send_first(lost)
        harness.send_terminal(lost, ok=False)
        harness.pass_events()
        harness.step()
        taking_over = list(harness.remotes.values())[-1]
        taking_over.cached, taking_over.computed = second
        harness.finish()
        assert told.finished is not None and told.finished.timings.prefill_worker == "p2"
        assert told.finished.timings.computed_tokens == computed

    def test_what_a_preempted_choice_computes_again_is_not_cached(self) -> None:
        harness = DecodeHarness(num_blocks=8, block_size=4, max_request_tokens=30, peers=["p1:1"])
        params = SamplingParams(max_tokens=18, ignore_eos=True, seed=1)
        for index in range(3):
            harness.submit(request(f"r{index}", prompt_ids=prompt(6, index), params=params, prefill_targets=(P1,)))
        harness.step()
        for remote in harness.remotes.values():
            remote.cached = 4
        harness.finish()
        timings = [told.finished.timings for told in harness.told.values() if told.finished is not None]
        assert timings[0].computed_tokens == 2
        assert any(figures.preemptions and figures.computed_tokens == 6 for figures in timings)

    def test_a_worker_that_had_more_than_the_prompt_is_not_believed(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        told = harness.submit(request(length=17, prefill_targets=(P1,)))
        harness.step()
        run = only_remote(harness).run
        tokens = first_tokens(run.prompt_ids, run.params, run.first_choices)
        harness.engine.handle(FirstArrived(run.transfer_id, tokens, cached_tokens=18))
        assert told.tokens == [[]] and [cancel.transfer_id for cancel in harness.cancels] == [run.transfer_id]
        harness.finish()
        assert told.finished is not None and told.finished.timings.computed_tokens == 17

    @pytest.mark.parametrize(("pending", "remote"), [(8, False), (9, True)])
    def test_short_prompts_stay_here(self, pending: int, remote: bool) -> None:
        harness = DecodeHarness(peers=["p1:1"], local_prefill_tokens=8)
        harness.submit(request(length=pending, prefill_targets=(P1,)))
        harness.step()
        assert bool(harness.remotes) is remote
        harness.finish()

    def test_targets_that_are_not_paired_are_passed_over(self) -> None:
        harness = DecodeHarness(peers=["p2:1"])
        harness.submit(request(prefill_targets=(P1, P2)))
        harness.step()
        assert only_remote(harness).run.target == P2
        harness.finish()

    def test_a_target_that_can_get_no_staging_slot_is_passed_over(self) -> None:
        harness = DecodeHarness(peers=("p1:1", "p2:1"))
        harness.transfer.without_slots.add("p1:1-incarnation")
        harness.submit(request(prefill_targets=(P1, P2)))
        harness.step()
        assert only_remote(harness).run.target == P2
        harness.complete(only_remote(harness))
        harness.finish()

    def test_a_target_whose_blocks_were_wanted_is_asked_again(self) -> None:
        harness = DecodeHarness(peers=("p1:1",))
        told = harness.submit(request(prefill_targets=(P1,)))
        harness.step()
        first = only_remote(harness)
        harness.engine._give_up(harness.engine._jobs[told.request.key].prompt)
        harness.send_terminal(first, ok=False)
        harness.pass_events()
        harness.step()
        again = [remote for remote in harness.remotes.values() if remote is not first]
        assert [remote.run.target for remote in again] == [P1]
        harness.complete(again[0])
        harness.finish()
        assert told.finished is not None and told.finished.timings.prefill_retries == 0

    def test_a_failed_worker_is_followed_by_the_next_and_then_by_this_one(self) -> None:
        harness = DecodeHarness(peers=["p1:1", "p2:1"])
        told = harness.submit(request(prefill_targets=(P1, P2)))
        for target in (P1, P2):
            harness.step()
            remote = list(harness.remotes.values())[-1]
            assert remote.run.target == target
            harness.send_terminal(remote, ok=False)
            harness.pass_events()
        harness.finish()
        assert len(harness.remotes) == 2 and harness.cancels == []
        assert told.finished is not None and told.finished.timings.prefill_worker == "decode-0"
        assert told.finished.timings.prefill_retries == 2

    def test_blocks_are_held_until_nothing_is_written_to_them(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        told = harness.submit(request(prefill_targets=(P1,)))
        harness.step()
        told.cancelled = True
        harness.engine.handle(Cancel("r", 0))
        assert told.outcome() is None and harness.engine.snapshot.owned == 3
        assert [c.transfer_id for c in harness.cancels] == [100]
        harness.pass_events()
        assert told.outcome() is Outcome.CANCELLED
        assert harness.engine.snapshot.owned == 0

    def test_a_silent_worker_is_given_up(self) -> None:
        harness = DecodeHarness(peers=["p1:1"], prefill_timeout=5.0)
        harness.submit(request(prefill_targets=(P1,)))
        harness.step()
        harness.clock.now += 4.0
        harness.engine.handle(PrefillProgressed(100))
        harness.clock.now += 4.0
        harness.step()
        assert harness.cancels == [] and harness.engine.next_deadline() == pytest.approx(1.0)
        harness.clock.now += 1.0
        harness.step()
        assert [c.transfer_id for c in harness.cancels] == [100]
        only_remote(harness).over = True
        harness.finish()

    def test_a_transfer_that_fails_here_is_cancelled_there(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        harness.submit(request(prefill_targets=(P1,)))
        harness.step()
        harness.transfer.finish_receive(100, "failed", "a message was corrupt")
        harness.pass_events()
        assert [c.transfer_id for c in harness.cancels] == [100]
        only_remote(harness).over = True
        harness.finish()

    def test_first_tokens_that_nobody_asked_for_are_ignored(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        outputs = reference(prompt(10), LONG, 0, harness.max_request_tokens)[0]
        told = harness.submit(
            request(choices=(ChoicePrefix(tuple(outputs[:2])), ChoicePrefix()), prefill_targets=(P1,))
        )
        harness.step()
        assert only_remote(harness).run.first_choices == (1,)
        bad = next_token(told.request.prompt_ids, (), LONG, 1)
        harness.engine.handle(FirstArrived(100, [(0, bad), (77, bad)]))
        harness.engine.handle(FirstArrived(99, [(1, bad)]))
        assert told.tokens == [outputs[:2], []]
        harness.finish()

    def test_without_first_tokens_the_end_of_the_prompt_is_computed_here(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        told = harness.submit(request(length=10, prefill_targets=(P1,)))
        harness.step()
        harness.land(only_remote(harness), 100)
        harness.send_terminal(only_remote(harness), ok=True)
        harness.finish()
        assert told.tokens[0]
        assert [len(c.token_ids) for c in harness.runner.calls[0]] == [2]

    def test_when_the_first_token_is_the_last_the_request_ends_with_its_transfer(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        told = harness.submit(request(prefill_targets=(P1,), params=SamplingParams(max_tokens=1)))
        harness.step()
        harness.send_first(only_remote(harness))
        assert told.reasons and told.finished is None
        harness.finish()
        assert harness.runner.calls == []

    def test_idle_while_a_transfer_is_pending(self) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        harness.submit(request(prefill_targets=(P1,)))
        assert harness.step() is False
        assert (harness.engine.snapshot.running, harness.engine.snapshot.transfers) == (1, 1)
        harness.finish()


class TestEnds:
    def started(self, **fields: Any) -> tuple[DecodeHarness, Told]:
        harness = DecodeHarness()
        told = harness.submit(request(**fields))
        harness.step()
        harness.step()
        return harness, told

    def test_cancel_frees_everything_at_once(self) -> None:
        harness, told = self.started(n=3)
        told.cancelled = True
        harness.engine.handle(Cancel("r", 0))
        assert told.outcome() is Outcome.CANCELLED
        assert harness.engine.snapshot.owned == 0 and harness.step() is False

    def test_cancelling_one_choice_leaves_the_others(self) -> None:
        harness, told = self.started(n=2)
        told.cancelled_choices = {0}
        before = len(told.tokens[0])
        for index in (0, 0, 9):
            harness.engine.handle(Cancel("r", 0, index))
        harness.finish()
        assert len(told.tokens[0]) == before and len(told.tokens[1]) == 12
        assert told.finished is not None and told.finished.outcome is Outcome.OK

    def test_cancelling_the_last_choice_ends_the_request_well(self) -> None:
        harness, told = self.started(n=2)
        told.cancelled_choices = {0, 1}
        for index in (0, 1):
            harness.engine.handle(Cancel("r", 0, index))
        assert told.finished is not None and told.finished.outcome is Outcome.OK
        harness.finish()

    def test_unknown_requests_are_ignored(self) -> None:
        harness, _ = self.started()
        for command in (Cancel("nobody", 0), Cancel("r", 1), StreamGone("nobody")):
            harness.engine.handle(command)
        harness.finish()

    def test_a_lost_stream_cancels_its_own_requests_only(self) -> None:
        harness, told = self.started()
        other = harness.submit(request("other", stream="t"))
        told.cancelled = True
        harness.engine.handle(StreamGone("s"))
        harness.finish()
        assert told.outcome() is Outcome.CANCELLED
        assert other.finished is not None and other.finished.outcome is Outcome.OK

    @pytest.mark.parametrize("remote", [False, True])
    def test_the_deadline_ends_a_request_wherever_it_is(self, remote: bool) -> None:
        harness = DecodeHarness(peers=["p1:1"])
        told = harness.submit(request(timeout=2.0, prefill_targets=(P1,) if remote else ()))
        harness.step()
        assert harness.engine.next_deadline() == pytest.approx(2.0)
        harness.clock.now += 2.0
        harness.step()
        harness.pass_events()
        assert told.finished is not None and told.finished.outcome is Outcome.DEADLINE
        assert harness.engine.next_deadline() is None
        for remote_prefill in harness.remotes.values():
            remote_prefill.over = True
        harness.finish()

    @pytest.mark.parametrize("remote", [False, True])
    @pytest.mark.parametrize(("n", "tokens"), [(1, 6), (2, 3), (4, 2)])
    def test_a_grammar_that_takes_too_long_ends_its_request_alone(
        self, monkeypatch: pytest.MonkeyPatch, remote: bool, n: int, tokens: int
    ) -> None:
        """The time of all choices counts together: 0.2 s a token here, where 1 s and a little are granted."""
        monkeypatch.setattr(GrammarState, "take_seconds", lambda _: 0.2)
        harness = DecodeHarness(peers=["p1:1"])
        other = harness.submit(request("other"))
        grammar = compile_regex("[a-v]*")
        told = harness.submit(request(n=n, grammar=grammar, prefill_targets=(P1,) if remote else ()))
        harness.finish()
        assert told.outcome() is Outcome.TOO_COMPLEX and other.outcome() is Outcome.OK
        assert [len(output) for output in told.tokens] == [tokens] * n
        assert told.reasons == {}

    def test_the_time_for_a_grammar_grows_with_the_output_forced_tokens_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grammar, seconds = compile_regex("[a-v]*"), iter([1.5])
        monkeypatch.setattr(GrammarState, "take_seconds", lambda _: next(seconds, 0.0))
        for known, outcome in ((100, Outcome.OK), (0, Outcome.TOO_COMPLEX)):
            seconds = iter([1.5])
            harness = DecodeHarness(num_blocks=128)
            params = SamplingParams(temperature=0.0, max_tokens=known + 3, ignore_eos=True)
            forced = tuple(2 + i % 20 for i in range(known))
            choices = (ChoicePrefix(forced),)
            told = harness.submit(request("r", choices=choices, params=params, grammar=grammar))
            while told.finished is None:
                harness.step()
            assert told.outcome() is outcome

    def test_without_requests_there_is_no_deadline(self) -> None:
        assert DecodeHarness().engine.next_deadline() is None


class TestLateMasks:
    """Who has no mask in time draws in a later step, and draws what it would have drawn."""

    @pytest.mark.parametrize("length", [1, 4, 9, 10])
    @pytest.mark.parametrize("budget", [3, 64])
    def test_no_token_is_another_and_nothing_is_left(self, length: int, budget: int) -> None:
        masks = UnreliableMasks()
        harness = DecodeHarness(budget=budget, masks=masks)
        params = SamplingParams(seed=5, max_tokens=8, prompt_logprobs=1)
        for number, pattern in enumerate(["[a-v]*", "[b-d]t?[c-f]*", None]):
            grammar = None if pattern is None else compile_regex(pattern)
            harness.submit(request(f"r{number}", length, n=3, params=params, grammar=grammar))
        harness.finish()
        assert masks.num_late > 0

    def test_others_go_on_meanwhile(self) -> None:
        harness = DecodeHarness(masks=UnreliableMasks(share_late=1.0))
        late = harness.submit(request("late", grammar=compile_regex("[a-v]*")))
        free = harness.submit(request("free"))
        for _ in range(6):
            harness.step()
        assert len(free.tokens[0]) == 6 and late.tokens == [[]]
        # All of its prompt is there but for the token that it has to draw from.
        assert [chunk.start for chunk in harness.runner.calls[-1]] == [14, 9]
        late.cancelled = True
        harness.engine.handle(Cancel("late", 0))
        harness.finish()

    def test_what_is_late_here_is_left_alone_when_a_prefill_worker_draws(self) -> None:
        """Its prompt loses its blocks meanwhile, and with them what made it short enough to be computed here."""
        masks = UnreliableMasks(share_late=1.0)
        harness = DecodeHarness(num_blocks=9, local_prefill_tokens=2, peers=["p1:1"], masks=masks)
        warm = harness.submit(request("warm", params=replace(LONG, max_tokens=1)))
        harness.step()
        assert warm.finished is not None
        harness.submit(request("old", prompt_ids=prompt(8, seed=3), params=replace(LONG, max_tokens=28)))
        harness.step()
        harness.submit(request("late", prefill_targets=(P1,), grammar=compile_regex("[a-v]*")))
        while not harness.remotes:
            harness.step()
        assert masks.num_late > 1
        harness.send_first(only_remote(harness))
        harness.check()
        masks.share_late = 0.0
        harness.finish()

    def test_what_is_computed_again_counts_once(self) -> None:
        harness = DecodeHarness(masks=UnreliableMasks())
        told = harness.submit(request(length=9, grammar=compile_regex("[a-v]*")))
        harness.finish()
        figures = harness.engine.snapshot.figures
        # The last one is drawn and not computed.
        assert (figures.tokens_computed, figures.tokens_decoded) == (9, len(told.tokens[0]) - 1)
