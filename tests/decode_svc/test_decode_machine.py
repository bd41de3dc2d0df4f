"""Whatever happens in whatever order, a decode engine tells each client the same tokens and gives every block back."""

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.grammar import Grammar
from common.sampling import SamplingParams
from decode_svc.messages import Cancel, PrefillProgressed, StreamGone
from decode_svc.request import ChoicePrefix, DecodeRequest, Outcome, PrefillTarget
from tests.decode_svc.harness import DecodeHarness, Remote, Told
from tests.factories.engines import MASKS, VOCAB, compile_regex, reference
from tests.factories.grammars import UnreliableMasks

PEERS = ("p1:1", "p2:1")
LONGEST = 40

#: Few families of prompts, so that prefixes are shared, in the middle of blocks too.
prompts = st.builds(
    lambda family, length: tuple((family * 7 + position * 5) % (VOCAB - 2) + 2 for position in range(length)),
    st.integers(0, 1),
    st.one_of(st.integers(1, 14), st.integers(15, LONGEST - 1), st.just(LONGEST - 1)),
)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 14),
    min_tokens=st.just(0),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (5, 6)]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logprobs=st.sampled_from([None, None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 3]),
)
candidates = st.lists(st.sampled_from(PEERS), max_size=3).map(
    lambda addresses: tuple(PrefillTarget(address.split(":")[0], address) for address in addresses)
)


@dataclass(frozen=True)
class Wanted:
    """What a gateway may ask for; `replayed` tokens of each choice are known already."""

    prompt: tuple[int, ...]
    params: SamplingParams
    targets: tuple[PrefillTarget, ...]
    stream: str
    timeout: float | None
    replayed: tuple[int, ...]
    regex: str | None

    @property
    def grammar(self) -> Grammar | None:
        return None if self.regex is None else compile_regex(self.regex)


wanted = st.builds(
    Wanted,
    prompt=prompts,
    params=sampling,
    targets=candidates,
    stream=st.sampled_from(["a", "b"]),
    timeout=st.sampled_from([None, None, None, 20.0]),
    replayed=st.one_of(
        st.sampled_from([(0,), (0,), (0, 0), (0, 0, 0)]),
        st.lists(st.integers(0, 15), min_size=1, max_size=3).map(tuple),
    ),
    regex=st.sampled_from([None, None, "[a-d]{2,6}", "([b-f]t?)+", "v*"]),
)


class DecodeEngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([10, 10, 13, 24]),
        budget=st.sampled_from([3, 7, 16]),
        local_prefill_tokens=st.sampled_from([0, 4]),
        max_batch_size=st.sampled_from([2, 16, 16]),
        masks=st.sampled_from([lambda: MASKS, UnreliableMasks]),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        local_prefill_tokens: int,
        max_batch_size: int,
        masks: Callable[[], object],
    ) -> None:
        self.harness = DecodeHarness(
            num_blocks=num_blocks,
            block_size=4,
            budget=budget,
            max_batch_size=max_batch_size,
            max_waiting=6,
            max_request_tokens=LONGEST,
            local_prefill_tokens=local_prefill_tokens,
            peers=PEERS,
            masks=masks(),
        )
        self.count = 0

    def remotes(self) -> list[Remote]:
        return [r for r in self.harness.remotes.values() if not r.over]

    def open(self) -> list[Told]:
        return [told for told in self.harness.told.values() if told.open]

    # --- the gateway -----------------------------------------------------------------------------------

    @rule(requests=st.lists(wanted, min_size=1, max_size=4))
    def submit(self, requests: list[Wanted]) -> None:
        for want in requests:
            choices = tuple(self.prefix(want, index) for index in range(len(want.replayed)))
            if all(choice.finished for choice in choices):
                continue
            self.count += 1
            self.harness.submit(
                DecodeRequest(
                    want.stream,
                    f"r{self.count}",
                    0,
                    want.prompt,
                    choices,
                    want.params,
                    want.targets,
                    timeout=want.timeout,
                    grammar=want.grammar,
                )
            )

    def prefix(self, want: Wanted, choice: int) -> ChoicePrefix:
        output, _ = reference(want.prompt, want.params, choice, LONGEST, want.grammar)
        length = want.replayed[choice]
        return ChoicePrefix(tuple(output[:length]), finished=length >= len(output))

    @rule(data=st.data(), what=st.sampled_from(["request", "choice", "choice", "stream", "peer", "clock", "clock"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        if what == "stream":
            self.break_stream(data.draw(st.sampled_from(["a", "b"])))
        elif what == "peer":
            self.pair_or_part(data.draw(st.sampled_from(PEERS)))
        elif what == "clock":
            self.harness.clock.now += data.draw(st.sampled_from([0.1, 3.0]))
        elif self.open():
            told = data.draw(st.sampled_from(self.open()))
            self.cancel(told, data.draw(st.integers(0, len(told.request.choices))) if what == "choice" else None)

    def cancel(self, told: Told, choice: int | None) -> None:
        if choice is None:
            told.cancelled = True
        elif choice not in told.reasons:
            told.cancelled_choices.add(choice)
        self.harness.engine.handle(Cancel(*told.request.key, choice=choice))

    def break_stream(self, stream: str) -> None:
        for told in self.open():
            told.cancelled |= told.request.stream == stream
        self.harness.engine.handle(StreamGone(stream))

    def pair_or_part(self, peer: str) -> None:
        if self.harness.peers.pop(peer, None) is None:
            self.harness.peers[peer] = f"{peer}-incarnation"

    # --- the engine ------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule(count=st.integers(1, 4))
    def step_and_hear(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()
            self.harness.pass_events()

    # --- prefill workers and the transfer thread -------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 20))
    @precondition(lambda self: self.harness.remotes)
    def kv_lands(self, data: st.DataObject, count: int) -> None:
        remote = data.draw(st.sampled_from(list(self.harness.remotes.values())))
        self.harness.land(remote, count)

    @rule(data=st.data(), count=st.sampled_from([1, 5, LONGEST]), lost=st.sampled_from([0, 0, 0, 0, 2]))
    @precondition(lambda self: self.harness.remotes)
    def scores_come(self, data: st.DataObject, count: int, lost: int) -> None:
        """In order; seldom with a hole."""
        remote = data.draw(st.sampled_from(list(self.harness.remotes.values())))
        remote.scored += lost
        self.harness.send_scores(remote, count)

    @rule(data=st.data())
    @precondition(lambda self: self.harness.remotes)
    def first_tokens_come(self, data: st.DataObject) -> None:
        """Late, twice, or never asked for: all the same."""
        self.harness.send_first(data.draw(st.sampled_from(list(self.harness.remotes.values()))))

    @rule(data=st.data(), ok=st.booleans(), landed=st.booleans())
    @precondition(lambda self: self.remotes())
    def prefill_ends(self, data: st.DataObject, ok: bool, landed: bool) -> None:
        """In any order relative to KV and first tokens, which may never have come."""
        remote = data.draw(st.sampled_from(self.remotes()))
        self.harness.land(remote, LONGEST * landed)
        self.harness.send_terminal(remote, ok=ok)

    @rule(data=st.data())
    @precondition(lambda self: self.remotes())
    def prefill_completes(self, data: st.DataObject) -> None:
        self.harness.complete(data.draw(st.sampled_from(self.remotes())))

    @rule(data=st.data())
    @precondition(lambda self: self.remotes())
    def prefill_progresses(self, data: st.DataObject) -> None:
        remote = data.draw(st.sampled_from(self.remotes()))
        self.harness.engine.handle(PrefillProgressed(remote.run.transfer_id))

    @rule(data=st.data())
    @precondition(lambda self: self.harness.transfer.receives)
    def transfer_fails(self, data: st.DataObject) -> None:
        self.harness.transfer.finish_receive(data.draw(st.sampled_from(list(self.harness.transfer.receives))), "failed")

    @rule(data=st.data())
    @precondition(lambda self: self.harness.transfer.events)
    def event_arrives(self, data: st.DataObject) -> None:
        transfer = self.harness.transfer
        self.harness.engine.handle(transfer.take_event(data.draw(st.integers(0, len(transfer.events) - 1))))

    # --- rules -----------------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.finish()
        assert self.harness.counts[Outcome.FAILED] == 0


DecodeEngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestDecodeEngine = DecodeEngineMachine.TestCase
