"""Whatever happens in whatever order, a prefill engine announces each token once and ends each Run once."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.sampling import SamplingParams
from prefill_svc.request import Cancel, PeerGone, PrefillRequest
from tests.factories.engines import VOCAB, compile_regex
from tests.prefill_svc.harness import PrefillHarness, Told

PEERS = ("d1", "d2")
LONGEST = 40

prompts = st.builds(
    lambda family, length: tuple((family * 7 + position * 5) % VOCAB for position in range(length)),
    st.integers(0, 1),
    st.one_of(st.integers(1, 14), st.integers(15, LONGEST), st.just(LONGEST)),
)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 3]),
)


class PrefillEngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([10, 13, 24]),
        budget=st.sampled_from([3, 7, 16]),
        max_batch_size=st.sampled_from([1, 3, 16]),
    )
    def start(self, num_blocks: int, budget: int, max_batch_size: int) -> None:
        self.harness = PrefillHarness(
            num_blocks=num_blocks,
            block_size=4,
            budget=budget,
            max_batch_size=max_batch_size,
            max_waiting=4,
            max_prompt_tokens=LONGEST,
        )
        self.count = 0

    def open(self) -> list[Told]:
        return [told for told in self.harness.told.values() if told.ended is None]

    @rule(
        prompt=prompts,
        params=sampling,
        skip=st.one_of(st.just(0), st.integers(0, LONGEST)),
        first_choices=st.sampled_from([(), (0,), (0, 1, 2), (1, 3)]),
        peer=st.sampled_from(PEERS),
        regex=st.sampled_from([None, None, "[b-d]t?[c-f]*", "v+"]),
    )
    def run(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        skip: int,
        first_choices: tuple[int, ...],
        peer: str,
        regex: str | None,
    ) -> None:
        self.count += 1
        grammar = None if regex is None else compile_regex(regex)
        first_token = min(skip, len(prompt) - 1)
        waiting = self.harness.engine.snapshot.waiting
        told = self.harness.run(
            PrefillRequest(
                peer, self.count, f"r{self.count}", prompt, first_token, first_choices, params, "", "", grammar
            )
        )
        assert (told.ended is not None) == (waiting >= 4), f"{waiting} were waiting, then {told.ended}"
        if told.ended is not None:
            assert told.ended.outcome == "shortage", told.ended

    @rule(data=st.data())
    @precondition(lambda self: self.harness.told)
    def cancel(self, data: st.DataObject) -> None:
        """Ended ones, too: the command and the Terminal cross."""
        told = data.draw(st.sampled_from(list(self.harness.told.values())))
        told.cancelled |= told.ended is None
        self.harness.engine.handle(Cancel(told.request.peer, told.request.transfer_id))

    @rule(peer=st.sampled_from(PEERS), transport_first=st.booleans())
    def peer_goes(self, peer: str, transport_first: bool) -> None:
        for told in self.open():
            told.cancelled |= told.request.peer == peer
        if transport_first:
            for transfer_id in [t for t, send in self.harness.transfer.sends.items() if send.peer == peer]:
                self.harness.fail_send(transfer_id)
        self.harness.engine.handle(PeerGone(peer))

    @rule(count=st.sampled_from([1, 1, 4]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule(data=st.data())
    @precondition(lambda self: self.harness.transfer.sends)
    def last_write_ends(self, data: st.DataObject) -> None:
        self.harness.settle_send(data.draw(st.sampled_from(list(self.harness.transfer.sends))))

    @rule(data=st.data())
    @precondition(lambda self: self.harness.transfer.sends)
    def write_fails(self, data: st.DataObject) -> None:
        self.harness.fail_send(data.draw(st.sampled_from(list(self.harness.transfer.sends))))

    @rule(data=st.data())
    @precondition(lambda self: self.harness.transfer.events)
    def event_arrives(self, data: st.DataObject) -> None:
        transfer = self.harness.transfer
        self.harness.engine.handle(transfer.take_event(data.draw(st.integers(0, len(transfer.events) - 1))))

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish()


PrefillEngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestPrefillEngine = PrefillEngineMachine.TestCase
