"""Many small requests in a pool that is too small for them: preemption, give-ups and waiting are the rule here."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import SamplingParams
from decode_svc.messages import Cancel
from decode_svc.request import ChoicePrefix, DecodeRequest, PrefillTarget
from tests.decode_svc.harness import DecodeHarness
from tests.factories.engines import VOCAB, reference

ADDRESSES = ("p1:1", "p2:1")
LONGEST = 36


class Crowd:
    """Random events, most of them steps; `chance` decides everything."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.harness = DecodeHarness(
            num_blocks=self.chance.choice([9, 10, 12]),
            block_size=4,
            budget=self.chance.choice([4, 16, 32]),
            max_request_tokens=LONGEST,
            peers=ADDRESSES,
        )

    def submit(self, number: int) -> None:
        chance = self.chance
        length, family = chance.randint(1, 12), chance.randint(0, 2)
        prompt = tuple((family * 7 + position * 5) % (VOCAB - 2) + 2 for position in range(length))
        temperature = chance.choice([0.0, 0.0, 1.0])
        params = SamplingParams(
            temperature=temperature, seed=number % 3, max_tokens=chance.randint(6, 20), ignore_eos=True
        )
        targets = tuple(PrefillTarget(a[:2], a) for a in ADDRESSES if chance.random() < 0.4)
        choices = tuple(self.prefix(prompt, params, index) for index in range(chance.choice([1, 1, 2, 3])))
        if not all(choice.finished for choice in choices):
            self.harness.submit(DecodeRequest("s", f"r{number}", 0, prompt, choices, params, targets))

    def prefix(self, prompt: tuple[int, ...], params: SamplingParams, index: int) -> ChoicePrefix:
        output, _ = reference(prompt, params, index, LONGEST)
        length = self.chance.choice([0, 0, 0, self.chance.randint(0, len(output))])
        return ChoicePrefix(tuple(output[:length]), finished=length == len(output))

    def happen(self) -> None:
        """One event of a prefill worker, the transfer thread or a client."""
        chance, harness = self.chance, self.harness
        remotes = [remote for remote in harness.remotes.values() if not remote.over]
        if remotes and chance.random() < 0.6:
            remote = chance.choice(remotes)
            action = chance.choice(["complete", "complete", "land", "first", "fail"])
            if action == "complete":
                harness.complete(remote)
            elif action == "land":
                harness.land(remote, chance.randint(1, 8))
            elif action == "first" and not remote.first_sent:
                harness.send_first(remote)
            elif action == "fail":
                harness.send_terminal(remote, ok=False)
        elif harness.told and chance.random() < 0.1:
            told = chance.choice(list(harness.told.values()))
            told.cancelled |= told.open
            harness.engine.handle(Cancel(*told.request.key))
        elif harness.transfer.events:
            harness.engine.handle(harness.transfer.take_event())

    def run(self, num_requests: int) -> None:
        for number in range(num_requests):
            self.submit(number)
            for _ in range(self.chance.randint(0, 6)):
                self.harness.step()
                if self.chance.random() < 0.5:
                    self.happen()
        self.harness.finish()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 9))
def test_every_token_comes_once_however_crowded_it_is(seed: int, num_requests: int) -> None:
    Crowd(seed).run(num_requests)


def test_these_crowds_do_preempt_and_give_up() -> None:
    """Or the test above would prove little."""
    preemptions = gave_up = 0
    for seed in range(8):
        crowd = Crowd(seed)
        crowd.run(8)
        preemptions += crowd.harness.engine.snapshot.preemptions
        gave_up += len(crowd.harness.cancels)
    assert preemptions > 20 and gave_up > 3


@pytest.mark.parametrize("count", [2, 5])
def test_the_oldest_is_never_preempted_and_all_finish_in_order(count: int) -> None:
    harness = DecodeHarness(num_blocks=10, block_size=4)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ends: list[str] = []
    for number in range(count):
        prompt = tuple((number * 7 + position * 5) % (VOCAB - 2) + 2 for position in range(12))
        harness.submit(DecodeRequest("s", f"r{number}", 0, prompt, (ChoicePrefix(),), params))
    while len(ends) < count:
        harness.step()
        ends += [r for (r, _), told in harness.told.items() if told.finished is not None and r not in ends]
    assert ends == [f"r{number}" for number in range(count)]
    first = harness.told[("r0", 0)].finished
    assert first is not None and first.timings.preemptions == 0 and harness.engine.snapshot.preemptions > 0
    harness.check_end()
