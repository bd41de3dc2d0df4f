"""A decode engine on fakes, with a book of what it was asked and what it said, and the rules that both must keep."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from common.engine.block_pool import BlockPool
from common.engine.grammar import Grammar
from common.engine.scheduling import StepPacer
from common.engine.scoring import in_parts
from common.sampling import FinishReason, SampledToken, TokenLogprobs
from decode_svc.messages import (
    AcceptedOut,
    CancelOut,
    DecodeOutput,
    DeltaOut,
    FinishedOut,
    FirstArrived,
    PrefillEnded,
    PromptLogprobsArrived,
    PromptLogprobsOut,
    RejectedOut,
    RunOut,
    ShortageOut,
    Submit,
)
from decode_svc.request import DecodeRequest, Outcome
from decode_svc.validation import RequestLimits
from decode_svc.worker import DecodeEngine
from kv_store.transfer.events import ReceiveFinished
from tests.factories.engines import (
    EOS,
    MASKS,
    SAMPLER,
    VOCAB,
    FakeKVCache,
    FakeRunner,
    FakeTransfer,
    first_tokens,
    prompt_scores,
    reference,
)
from tests.factories.grammars import UnreliableMasks

Key = tuple[str, int]


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Told:
    """What a gateway was told of one request."""

    request: DecodeRequest
    answers: list[DecodeOutput] = field(default_factory=list)
    #: Output by choice, forced tokens included.
    tokens: list[list[int]] = field(default_factory=list)
    sampled: list[list[SampledToken]] = field(default_factory=list)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    scores: list[TokenLogprobs] = field(default_factory=list)
    finished: FinishedOut | None = None
    cancelled: bool = False
    #: Choices cancelled one by one, before they had ended.
    cancelled_choices: set[int] = field(default_factory=set)

    @property
    def accepted(self) -> bool:
        return bool(self.answers) and isinstance(self.answers[0], AcceptedOut)

    @property
    def open(self) -> bool:
        return self.accepted and self.finished is None

    @property
    def scores_wanted(self) -> list[TokenLogprobs]:
        num_top = self.request.params.prompt_logprobs
        return [] if num_top is None else prompt_scores(self.request.prompt_ids, num_top)

    def outcome(self) -> Outcome | None:
        return None if self.finished is None else self.finished.outcome


@dataclass
class Remote:
    """A prompt that a prefill worker was asked for, as that worker sees it."""

    run: RunOut
    #: Prompt tokens that it had in its cache, and computed before it was told to stop.
    cached: int = 0
    computed: int = 0
    landed: int = 0
    #: Prompt tokens whose log probabilities were sent.
    scored: int = 0
    first_sent: bool = False
    #: Its Terminal was sent, or its stream is gone.
    over: bool = False

    @property
    def complete(self) -> bool:
        return self.landed == len(self.run.prompt_ids) - self.run.first_token


class DecodeHarness:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        budget: int = 64,
        max_batch_size: int = 8,
        max_waiting: int = 64,
        max_request_tokens: int | None = None,
        local_prefill_tokens: int = 0,
        prefill_timeout: float = 5.0,
        peers: Sequence[str] = (),
        masks: object = MASKS,
    ) -> None:
        self.clock = FakeClock()
        self.masks = masks
        self.kv = FakeKVCache(num_blocks, block_size)
        self.runner = FakeRunner(self.kv)
        self.pool = BlockPool(num_blocks, block_size)
        self.transfer = FakeTransfer(self.kv)
        self.max_request_tokens = max_request_tokens or num_blocks * block_size
        #: Paired prefill workers, address to incarnation.
        self.peers = {peer: f"{peer}-incarnation" for peer in peers}
        self.told: dict[Key, Told] = {}
        self.remotes: dict[int, Remote] = {}
        self.cancels: list[CancelOut] = []
        self.counts: Counter[Outcome] = Counter()
        self.engine = DecodeEngine(
            worker_id="decode-0",
            runner=cast(Any, self.runner),
            sampler=SAMPLER,
            masks=cast(Any, masks),
            pool=self.pool,
            transfer=cast(Any, self.transfer),
            pacer=StepPacer(budget, 1.0, min_tokens=budget),
            limits=RequestLimits(self.max_request_tokens, VOCAB),
            eos_token_ids=(EOS,),
            max_batch_size=max_batch_size,
            max_waiting=max_waiting,
            local_prefill_tokens=local_prefill_tokens,
            prefill_timeout=prefill_timeout,
            first_transfer_id=100,
            find_peer=self.peers.get,
            emit=self._take,
            clock=self.clock,
        )

    # --- what goes in ----------------------------------------------------------------------------------

    def submit(self, request: DecodeRequest, *, draining: bool = False) -> Told:
        told = Told(
            request, tokens=[list(c.output_ids) for c in request.choices], sampled=[[] for _ in request.choices]
        )
        self.told[request.key] = told
        self.engine.handle(Submit(request, draining))
        assert len(told.answers) == 1, f"answers to one Submit: {told.answers}"
        return told

    def step(self) -> bool:
        computed = self.engine.step()
        self.check()
        if not computed and not self.transfer.receives and not self.transfer.events:
            snapshot = self.engine.snapshot
            assert snapshot.running == snapshot.waiting == 0, f"stuck: {snapshot}"
        return computed

    def pass_events(self) -> None:
        while self.transfer.events:
            self.engine.handle(self.transfer.take_event())

    # --- what a prefill worker does --------------------------------------------------------------------

    def land(self, remote: Remote, count: int) -> None:
        """KV of the next `count` tokens arrives."""
        run = remote.run
        for _ in range(min(count, len(run.prompt_ids) - run.first_token - remote.landed)):
            position = run.first_token + remote.landed
            self.transfer.land(run.transfer_id, position, run.prompt_ids[position])
            remote.landed += 1

    def send_first(self, remote: Remote) -> None:
        run = remote.run
        remote.first_sent = True
        tokens = first_tokens(run.prompt_ids, run.params, run.first_choices, self.grammar_of(remote))
        remote.computed = len(run.prompt_ids) - remote.cached
        self.engine.handle(FirstArrived(run.transfer_id, tokens, remote.cached))

    def grammar_of(self, remote: Remote) -> Grammar | None:
        """What the prefill worker makes of what it was sent."""
        return remote.run.grammar

    def send_scores(self, remote: Remote, count: int) -> None:
        """Log probabilities of the next `count` prompt tokens, if they were asked for."""
        run = remote.run
        if run.params.prompt_logprobs is None:
            return
        entries = prompt_scores(run.prompt_ids, run.params.prompt_logprobs)[remote.scored : remote.scored + count]
        for first_position, part in in_parts(remote.scored + 1, entries):
            self.engine.handle(PromptLogprobsArrived(run.transfer_id, first_position, part))
        remote.scored += len(entries)

    def send_terminal(self, remote: Remote, *, ok: bool) -> None:
        remote.over = True
        if ok:
            remote.computed = len(remote.run.prompt_ids) - remote.cached
        self.engine.handle(PrefillEnded(remote.run.transfer_id, ok, "", remote.cached, remote.computed))
        if ok:
            self.transfer.seal(remote.run.transfer_id, 1, 1)

    def complete(self, remote: Remote) -> None:
        """All that is left of a good prefill, in its usual order; the event is not passed on yet."""
        self.land(remote, len(remote.run.prompt_ids))
        self.send_scores(remote, len(remote.run.prompt_ids))
        if not remote.first_sent and remote.run.first_choices:
            self.send_first(remote)
        if not remote.over:
            self.send_terminal(remote, ok=True)

    # --- to the end ------------------------------------------------------------------------------------

    def finish(self, max_steps: int = 3000) -> None:
        """Let every transfer complete and step until nothing is left; then nothing may be held."""
        for _ in range(max_steps):
            for remote in self.remotes.values():
                if not remote.over:
                    self.complete(remote)
            # What was sealed without all of its KV never completes by itself: the transfer thread gives up on it.
            for transfer_id in [t for t in self.transfer.receives if self.remotes[t].over]:
                self.transfer.finish_receive(transfer_id, "failed", "sealed, and not all came")
            self.pass_events()
            if not self.step() and not self.transfer.events and all(r.over for r in self.remotes.values()):
                break
        else:
            raise AssertionError(f"not finished after {max_steps} steps: {self.engine.snapshot}")
        self.check_end()

    # --- what comes out --------------------------------------------------------------------------------

    def _take(self, outputs: Sequence[DecodeOutput]) -> None:
        for output in outputs:
            match output:
                case RunOut():
                    self.remotes[output.transfer_id] = Remote(output)
                case CancelOut():
                    assert output.transfer_id in self.remotes, f"cancelled {output}, which was never asked for"
                    assert output not in self.cancels, f"cancelled twice: {output}"
                    self.cancels.append(output)
                case AcceptedOut() | RejectedOut() | ShortageOut():
                    self.told[(output.request_id, output.attempt)].answers.append(output)
                case PromptLogprobsOut():
                    told = self.told[(output.request_id, output.attempt)]
                    assert told.open, f"scores of {output.request_id}, which is not open"
                    assert output.first_position == len(told.scores) + 1, f"{output} after {len(told.scores)} entries"
                    told.scores += output.entries
                case DeltaOut():
                    self._take_delta(output)
                case FinishedOut():
                    told = self.told[(output.request_id, output.attempt)]
                    assert told.open, f"{output.request_id} finished twice, or was not accepted"
                    told.finished = output
                    self.counts[output.outcome] += 1

    def _take_delta(self, delta: DeltaOut) -> None:
        told = self.told[(delta.request_id, delta.attempt)]
        assert told.open, f"delta of {delta.request_id}, which is not open"
        assert delta.stream == told.request.stream, delta
        assert told.scores == told.scores_wanted, f"delta of {delta.request_id} after {len(told.scores)} scores"
        tokens = told.tokens[delta.choice]
        assert delta.first_index == len(tokens), f"token {delta.first_index} after {len(tokens)} tokens"
        assert delta.choice not in told.reasons, f"token after the end of choice {delta.choice}"
        assert not told.request.choices[delta.choice].finished, f"token for choice {delta.choice}, finished before"
        assert delta.choice not in told.cancelled_choices, f"token for cancelled choice {delta.choice}"
        assert delta.computed_tokens > 0, f"{delta} of a prompt that nobody computed"
        tokens += [token.token_id for token in delta.tokens]
        told.sampled[delta.choice] += delta.tokens
        if delta.finish_reason is not None:
            told.reasons[delta.choice] = delta.finish_reason

    # --- what must be true -----------------------------------------------------------------------------

    def check(self) -> None:
        """At any moment."""
        self.pool.check()
        if isinstance(self.masks, UnreliableMasks):
            self.masks.check()
        snapshot = self.engine.snapshot
        assert snapshot.free + snapshot.cached + snapshot.owned == self.pool.num_blocks, snapshot
        ending = sum(isinstance(event, ReceiveFinished) for event in self.transfer.events)
        assert snapshot.transfers == len(self.transfer.receives) + ending, snapshot
        block_size = self.pool.block_size
        for slot in self.kv.receiving:
            assert self.pool.ref_count(slot // block_size) == 1, f"slot {slot} is written by a peer and not held"

    def check_end(self) -> None:
        """When all is over."""
        snapshot = self.engine.snapshot
        assert snapshot.owned == snapshot.running == snapshot.waiting == snapshot.transfers == 0, snapshot
        assert snapshot.queued_tokens == 0, snapshot
        accepted = [told for told in self.told.values() if told.accepted]
        assert snapshot.figures.accepted == len(accepted), snapshot
        ended = snapshot.figures.finished + snapshot.figures.cancelled + snapshot.figures.failed
        assert ended == len(accepted), snapshot
        for told in accepted:
            self._check_answer(told)

    def _check_answer(self, told: Told) -> None:
        request, finished = told.request, told.finished
        assert finished is not None, f"{request.request_id} has no terminal event"
        assert finished.outcome is not Outcome.FAILED, finished
        if finished.outcome is Outcome.CANCELLED:
            assert told.cancelled, f"{request.request_id} was never cancelled"
        assert told.scores == told.scores_wanted[: len(told.scores)], f"scores of {request}: {told.scores}"
        assert finished.output_tokens == sum(len(tokens) for tokens in told.tokens), finished
        assert finished.timings.computed_tokens <= len(request.prompt_ids), finished
        if any(told.sampled):
            assert finished.timings.computed_tokens > 0, "tokens are drawn from logits of the prompt's last token"
        for index, tokens in enumerate(told.tokens):
            if request.choices[index].finished:
                continue
            expected, reason = reference(
                request.prompt_ids, request.params, index, self.max_request_tokens, request.grammar
            )
            assert tokens == expected[: len(tokens)], f"choice {index} of {request}: {tokens}, not {expected}"
            if finished.outcome is Outcome.OK and index not in told.cancelled_choices:
                assert tokens == expected and told.reasons.get(index) is reason, f"choice {index} of {request}: {told}"
            if index in told.reasons:
                assert tokens == expected and told.reasons[index] is reason, f"choice {index} of {request}: {told}"
