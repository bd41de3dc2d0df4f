"""Both engines together, KV moving between their fake pages: block sizes, caches and timing change no token."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import SamplingParams
from decode_svc.messages import CancelOut, FirstArrived, PrefillEnded, PrefillProgressed, PromptLogprobsArrived
from decode_svc.request import ChoicePrefix, DecodeRequest, PrefillTarget
from prefill_svc.request import Cancel, Ended, FirstTokens, PrefillRequest, Progressed, PromptLogprobs
from tests.decode_svc.harness import DecodeHarness
from tests.factories.engines import VOCAB, compile_regex
from tests.prefill_svc.harness import PrefillHarness

ADDRESS = "p:1"


class System:
    """A decode engine and a prefill engine; each call of `tick` moves one of the things that can move."""

    def __init__(self, decode_block: int, prefill_block: int, seed: int) -> None:
        self.decode = DecodeHarness(
            num_blocks=60 // decode_block, block_size=decode_block, budget=8, max_request_tokens=48, peers=[ADDRESS]
        )
        self.prefill = PrefillHarness(num_blocks=80 // prefill_block, block_size=prefill_block, budget=8)
        self.random = random.Random(seed)
        self._asked: set[int] = set()
        self._cancelled = 0
        self._delivered = 0
        self._landed: dict[int, int] = {}

    def tick(self) -> None:
        moves = [self._carry, self._step_prefill, self._step_decode, self._move_kv, self._pass_events]
        self.random.choice(moves)()

    def _step_prefill(self) -> None:
        self.prefill.step()

    def _step_decode(self) -> None:
        self.decode.step()

    def _carry(self) -> None:
        """What the pair's stream carries, both ways, in order."""
        for transfer_id, remote in list(self.decode.remotes.items()):
            if transfer_id not in self._asked:
                self._asked.add(transfer_id)
                run = remote.run
                self.prefill.run(
                    PrefillRequest(
                        "d",
                        transfer_id,
                        "",
                        run.prompt_ids,
                        run.first_token,
                        run.first_choices,
                        run.params,
                        "",
                        "",
                        self.decode.grammar_of(remote),
                    )
                )
        for cancel in self.decode.cancels[self._cancelled :]:
            self._cancel(cancel)
        self._cancelled = len(self.decode.cancels)
        for batch in self.prefill.batches[self._delivered :]:
            for output in batch:
                self._deliver(output)
        self._delivered = len(self.prefill.batches)

    def _cancel(self, cancel: CancelOut) -> None:
        told = self.prefill.told[("d", cancel.transfer_id)]
        told.cancelled |= told.ended is None
        self.prefill.engine.handle(Cancel("d", cancel.transfer_id))

    def _deliver(self, output: object) -> None:
        match output:
            case FirstTokens():
                self.decode.engine.handle(FirstArrived(output.transfer_id, output.tokens))
            case PromptLogprobs():
                arrived = PromptLogprobsArrived(output.transfer_id, output.first_position, output.entries)
                self.decode.engine.handle(arrived)
            case Progressed():
                self.decode.engine.handle(PrefillProgressed(output.transfer_id))
            case Ended():
                self.decode.remotes[output.transfer_id].over = True
                self.decode.engine.handle(PrefillEnded(output.transfer_id, output.outcome == "ok", output.message))
                if output.outcome == "ok":
                    self.decode.transfer.seal(output.transfer_id, output.messages, output.bytes)

    def _move_kv(self) -> None:
        """Some tokens of some send; the last one lets it finish."""
        for transfer_id, send in list(self.prefill.transfer.sends.items()):
            start = self._landed.get(transfer_id, send.first_token)
            end = min(self.prefill.transfer.tokens_ready(transfer_id), start + self.random.randint(1, 9))
            for position in range(start, end):
                self.decode.transfer.land(transfer_id, position, self.prefill.transfer.read(transfer_id, position))
            self._landed[transfer_id] = end
            if send.aborted or end == send.num_prompt_tokens:
                self.prefill.settle_send(transfer_id)

    def _pass_events(self) -> None:
        self.decode.pass_events()
        self.prefill.pass_events()

    @property
    def idle(self) -> bool:
        return all(told.finished is not None for told in self.decode.told.values()) and all(
            told.ended is not None for told in self.prefill.told.values()
        )


requests = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(1, 40),
        st.integers(1, 3),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1.0]),
            seed=st.integers(0, 9),
            max_tokens=st.integers(1, 8),
            prompt_logprobs=st.sampled_from([None, 0, 2]),
        ),
        st.sampled_from([None, None, "[a-d]{2,6}", "([b-f]t?)+"]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(requests, st.sampled_from([1, 3, 4, 5]), st.sampled_from([1, 4, 5, 16]), st.integers(0, 2**32))
def test_tokens_and_scores_are_those_of_the_reference(
    wanted: list[tuple[int, int, int, SamplingParams, str | None]], decode_block: int, prefill_block: int, seed: int
) -> None:
    system = System(decode_block, prefill_block, seed)
    for number, (family, length, n, params, regex) in enumerate(wanted):
        prompt = tuple((family * 7 + position * 5) % (VOCAB - 2) + 2 for position in range(length))
        targets = (PrefillTarget("p", ADDRESS),) if system.random.random() < 0.8 else ()
        system.decode.submit(
            DecodeRequest(
                "s",
                f"r{number}",
                0,
                prompt,
                (ChoicePrefix(),) * n,
                params,
                prefill_targets=targets,
                grammar=None if regex is None else compile_regex(regex),
            )
        )
        for _ in range(system.random.randint(0, 30)):
            system.tick()
    for _ in range(20_000):
        if system.idle:
            break
        system.tick()
    assert system.idle, (system.decode.engine.snapshot, system.prefill.engine.snapshot)
    system.decode.check_end()
    system.prefill.check_end()
