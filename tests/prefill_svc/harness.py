"""A prefill engine on fakes, with a book of what it was asked and what it said, and the rules that both must keep."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from common.engine.block_pool import BlockPool
from common.engine.scheduling import StepPacer
from common.sampling import SampledToken, TokenLogprobs
from prefill_svc.request import Ended, FirstTokens, PrefillOutput, PrefillRequest, Progressed, PromptLogprobs, Run
from prefill_svc.worker import PrefillEngine
from tests.factories.engines import (
    MASKS,
    SAMPLER,
    VOCAB,
    FakeKVCache,
    FakeRunner,
    FakeTransfer,
    first_tokens,
    prompt_scores,
)

Key = tuple[str, int]


@dataclass
class Told:
    """What a decode worker was told of one Run."""

    request: PrefillRequest
    #: Its peer was connected when it came.
    connected: bool = True
    first: Sequence[tuple[int, SampledToken]] | None = None
    scores: list[TokenLogprobs] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    ended: Ended | None = None
    cancelled: bool = False
    send_failed: bool = False

    def outcome(self) -> str | None:
        return None if self.ended is None else self.ended.outcome


class PrefillHarness:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        budget: int = 64,
        max_batch_size: int = 8,
        max_waiting: int = 64,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.kv = FakeKVCache(num_blocks, block_size)
        self.runner = FakeRunner(self.kv)
        self.pool = BlockPool(num_blocks, block_size)
        self.transfer = FakeTransfer(self.kv)
        self.max_prompt_tokens = max_prompt_tokens or num_blocks * block_size
        self.told: dict[Key, Told] = {}
        self.batches: list[list[PrefillOutput]] = []
        self.engine = PrefillEngine(
            runner=cast(Any, self.runner),
            sampler=SAMPLER,
            masks=MASKS,
            pool=self.pool,
            transfer=cast(Any, self.transfer),
            pacer=StepPacer(budget, 1.0, min_tokens=budget),
            max_batch_size=max_batch_size,
            max_prompt_tokens=self.max_prompt_tokens,
            vocab_size=VOCAB,
            max_waiting=max_waiting,
            emit=self._take,
        )

    # --- what goes in ----------------------------------------------------------------------------------

    def run(self, request: PrefillRequest) -> Told:
        told = self.told[(request.peer, request.transfer_id)] = Told(request)
        self.engine.handle(Run(request))
        return told

    def step(self) -> bool:
        computed = self.engine.step()
        self.check()
        if not computed and not self.transfer.sends and not self.transfer.events:
            snapshot = self.engine.snapshot
            assert snapshot.running == snapshot.waiting == 0, f"stuck: {snapshot}"
        return computed

    def pass_events(self) -> None:
        while self.transfer.events:
            self.engine.handle(self.transfer.take_event())

    # --- what the transfer thread does -----------------------------------------------------------------

    def settle_send(self, transfer_id: int) -> None:
        """End a send as its state demands, if its last write could be over now."""
        send = self.transfer.sends[transfer_id]
        if send.aborted:
            self.transfer.finish_send(transfer_id, "aborted", "aborted")
        elif send.closed:
            self.check_source(transfer_id)
            self.transfer.finish_send(transfer_id, "ok")

    def fail_send(self, transfer_id: int) -> None:
        send = self.transfer.sends[transfer_id]
        self.told[(send.peer, transfer_id)].send_failed = True
        self.transfer.finish_send(transfer_id, "failed", "a write failed")

    def check_source(self, transfer_id: int) -> None:
        """What a write of this moment would read is the prompt's KV."""
        send = self.transfer.sends[transfer_id]
        prompt = self.told[(send.peer, transfer_id)].request.prompt_ids
        for position in range(send.first_token, self.transfer.tokens_ready(transfer_id)):
            assert self.transfer.read(transfer_id, position) == prompt[position], f"position {position} of {send}"

    # --- to the end ------------------------------------------------------------------------------------

    def finish(self, max_steps: int = 2000) -> None:
        """Let every send go through and step until nothing is left; then nothing may be held."""
        for _ in range(max_steps):
            for transfer_id in list(self.transfer.sends):
                self.settle_send(transfer_id)
            self.pass_events()
            if not self.step() and not self.transfer.sends and not self.transfer.events:
                break
        else:
            raise AssertionError(f"not finished after {max_steps} steps: {self.engine.snapshot}")
        self.check_end()

    # --- what comes out --------------------------------------------------------------------------------

    def _take(self, outputs: Sequence[PrefillOutput]) -> None:
        self.batches.append(list(outputs))
        for output in outputs:
            told = self.told[(output.peer, output.transfer_id)]
            assert told.ended is None, f"{output} after {told.ended}"
            match output:
                case Ended():
                    told.ended = output
                case FirstTokens():
                    assert told.first is None, f"first tokens twice: {output}"
                    told.first = output.tokens
                case PromptLogprobs():
                    assert output.first_position == len(told.scores) + 1, f"{output} after {len(told.scores)} entries"
                    assert told.first is None, f"{output} after the first tokens"
                    told.scores += output.entries
                case Progressed():
                    # A sign of life for a prompt that waits comes by the clock.
                    waits = output.tokens_done == 0 and not told.progress
                    assert waits or output.tokens_done > max(told.progress, default=0), (
                        f"{output} after {told.progress}"
                    )
                    if not waits:
                        told.progress.append(output.tokens_done)

    # --- what must be true -----------------------------------------------------------------------------

    def check(self) -> None:
        """At any moment."""
        self.pool.check()
        snapshot = self.engine.snapshot
        assert snapshot.free + snapshot.cached + snapshot.owned == self.pool.num_blocks, snapshot
        for transfer_id, send in self.transfer.sends.items():
            self.check_source(transfer_id)
            for slot in send.slots:
                assert self.pool.ref_count(slot // self.pool.block_size) > 0, f"slot {slot} of {send} was given back"

    def check_end(self) -> None:
        """When all is over."""
        snapshot = self.engine.snapshot
        assert snapshot.owned == snapshot.running == snapshot.waiting == snapshot.queued_tokens == 0, snapshot
        figures = snapshot.figures
        assert figures.finished + figures.cancelled + figures.failed == figures.accepted, figures
        for told in self.told.values():
            self._check_answer(told)

    def _check_answer(self, told: Told) -> None:
        request, ended = told.request, told.ended
        assert ended is not None, f"{request} has no terminal event"
        if told.first is not None:
            expected = first_tokens(request.prompt_ids, request.params, request.first_choices, request.grammar)
            assert told.first == expected, f"first tokens of {request}: {told.first}, not {expected}"
        num_top = request.params.prompt_logprobs
        scores = [] if num_top is None else prompt_scores(request.prompt_ids, num_top)
        assert told.scores == scores[: len(told.scores)], f"scores of {request}: {told.scores}, not {scores}"
        if ended.outcome == "cancelled":
            assert told.cancelled, f"{request} was never cancelled"
        elif ended.outcome == "failed":
            assert told.send_failed, f"{request} failed by itself: {ended}"
        elif ended.outcome == "ok":
            assert (told.first is not None) == bool(request.first_choices), told
            assert told.scores == scores, f"scores of {request}: {told.scores}, not {scores}"
            assert num_top is None or ended.cached_tokens == 0, ended
            assert ended.messages == len(request.prompt_ids) - request.first_token, ended
            assert ended.cached_tokens + ended.computed_tokens == len(request.prompt_ids), ended
