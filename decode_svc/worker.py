"""The decode engine: reserves blocks, has prompts prefilled elsewhere or does it here, and decodes.

Life of a request, all on the engine thread:

1. `Submit`: checked, accepted, its prompt queued.
2. Admitted: the cached prefix is pinned and blocks for the rest are reserved. The missing KV comes from a prefill
   worker (`RunOut`; KV lands by the transfer thread), or is computed here in chunks between decodes.
3. If asked for, log probabilities of the prompt's tokens: from the prefill worker (`PromptLogprobsArrived`) or with
   each chunk that is computed here; they all leave before any token.
   First tokens: from the prefill worker (`FirstArrived`) or drawn here from the prompt's last logits.
4. The prompt is whole (`ReceiveFinished` ok, or the last local chunk): every open choice gets its blocks from it
   and joins the batch.
5. A token per step until each choice has ended; then `FinishedOut`, with nothing held any more.

A prefill worker that fails or falls silent sends the prompt back to step 2, for the next target or for local prefill.
Cancel and deadline end the request from anywhere; while a transfer may still write, its blocks are held.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from common.engine.batch import SequenceChunk
from common.engine.block_pool import BlockPool
from common.engine.block_table import BlockTable
from common.engine.grammar import MaskFiller
from common.engine.meters import Meters, Snapshot
from common.engine.runner import ModelRunner
from common.engine.sampler import Sampler
from common.engine.scheduling import StepPacer
from common.engine.scoring import in_parts
from common.errors import InvalidRequest
from common.sampling import FinishReason, SampledToken, TokenLogprobs
from decode_svc.drawing import TokenDrawer
from decode_svc.messages import (
    AcceptedOut,
    Cancel,
    DecodeOutput,
    DeltaOut,
    FinishedOut,
    FirstArrived,
    PrefillEnded,
    PrefillProgressed,
    PromptLogprobsArrived,
    PromptLogprobsOut,
    RejectedOut,
    ShortageOut,
    StreamGone,
    Submit,
)
from decode_svc.remote import RemotePrefills
from decode_svc.request import DecodeRequest, Job, Outcome, Phase, Sequence
from decode_svc.scheduler import DecodeScheduler, Work
from decode_svc.time_limits import TimeLimits
from decode_svc.validation import RequestLimits, check_request, start_grammars
from kv_store.transfer.events import PeerLost, ReceiveFinished
from kv_store.transfer.worker import KVTransfer


class DecodeEngine:
    """Everything that the engine thread owns: pool, scheduler, runner, sampler and the jobs.

    `emit` gets the outputs of each step or command in one call and must not block. `find_peer(address)` returns the
    incarnation of the prefill worker paired under that address, or None; it must be safe to call from this thread.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        runner: ModelRunner,
        sampler: Sampler,
        masks: MaskFiller,
        pool: BlockPool,
        transfer: KVTransfer,
        pacer: StepPacer,
        limits: RequestLimits,
        eos_token_ids: Seq[int],
        max_batch_size: int,
        max_waiting: int,
        local_prefill_tokens: int,
        prefill_timeout: float,
        first_transfer_id: int,
        find_peer: Callable[[str], str | None],
        emit: Callable[[Seq[DecodeOutput]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_id = worker_id
        self._runner = runner
        self._drawer = TokenDrawer(sampler, masks)
        self._pool = pool
        self._pacer = pacer
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_waiting = max_waiting
        self._time_limits = TimeLimits(prefill_timeout=prefill_timeout, clock=clock)
        self._emit = emit
        self._clock = clock
        self._scheduler = DecodeScheduler(pool, max_batch_size=max_batch_size)
        self._jobs: dict[tuple[str, int], Job] = {}
        self._next_order = 0
        self._outputs: list[DecodeOutput] = []
        self._remote = RemotePrefills(
            transfer=transfer,
            find_peer=find_peer,
            local_prefill_tokens=local_prefill_tokens,
            first_transfer_id=first_transfer_id,
            emit=self._send,
            clock=clock,
        )
        self._meters = Meters(pacer)
        self.snapshot = self._take_snapshot()

    # --- commands ----------------------------------------------------------------------------------

    def handle(self, command: object) -> None:
        match command:
            case Submit(request, draining):
                self._accept(request, draining)
            case Cancel(request_id, attempt, choice):
                self._cancel((request_id, attempt), choice)
            case StreamGone(stream):
                self._stream_gone(stream)
            case FirstArrived():
                self._first_arrived(command)
            case PromptLogprobsArrived(transfer_id, first_position, entries):
                self._scores_arrived(transfer_id, first_position, entries)
            case PrefillProgressed(transfer_id):
                self._remote.hear(transfer_id)
            case PrefillEnded():
                self._remote.ended(command)
            case ReceiveFinished():
                self._receive_finished(command)
            case PeerLost():
                # The pair's stream tells the same; a lost peer's receives end by ReceiveFinished.
                pass
            case _:
                raise AssertionError(f"unknown command {type(command).__name__}")
        self._flush()

    def _accept(self, request: DecodeRequest, draining: bool) -> None:
        reply_to = (request.stream, *request.key)
        try:
            self._check(request)
            grammars = start_grammars(request)
        except InvalidRequest as error:
            self._outputs.append(RejectedOut(*reply_to, error.field or "", error.message))
            return
        if draining or self._scheduler.num_waiting >= self._max_waiting:
            why = "this worker is draining" if draining else f"{self._max_waiting} requests are waiting already"
            self._outputs.append(ShortageOut(*reply_to, why, retry_after=1.0))
            return
        tables = [BlockTable(self._pool, request.cache_salt) for _ in range(1 + len(request.choices))]
        job = Job(request, arrived=self._clock(), order=self._next_order, tables=tables)
        for choice, grammar in zip(job.choices, grammars, strict=True):
            choice.grammar = grammar
        self._next_order += 1
        self._jobs[request.key] = job
        self._scheduler.enqueue(job.prompt)
        self._meters.figures.accepted += 1
        self._outputs.append(AcceptedOut(*reply_to))

    def _check(self, request: DecodeRequest) -> None:
        if request.key in self._jobs:
            raise InvalidRequest("this attempt is running already", field="request_id")
        check_request(request, self._limits)

    def _cancel(self, key: tuple[str, int], choice: int | None) -> None:
        job = self._jobs.get(key)
        if job is None or job.ending is not None:
            return
        if choice is None:
            self._end(job, Outcome.CANCELLED, "cancelled")
        elif choice < len(job.choices) and not job.choices[choice].done:
            self._drop(job.choices[choice])
            if not job.open_choices:
                self._end(job, Outcome.OK, "")

    def _stream_gone(self, stream: str) -> None:
        for key in [key for key, job in self._jobs.items() if job.request.stream == stream]:
            self._cancel(key, None)

    # --- remote prefill ----------------------------------------------------------------------------

    def _scores_arrived(self, transfer_id: int, first_position: int, entries: Seq[TokenLogprobs]) -> None:
        job = self._remote.hear(transfer_id)
        if job is not None and not self._tell_scores(job, first_position, entries):
            self._remote.abandon(job, failed=True, tell=True)

    def _first_arrived(self, first: FirstArrived) -> None:
        if (job := self._remote.hear(first.transfer_id)) is None:
            return
        by_choice = dict(first.tokens)
        drawn = [(choice, by_choice[choice.index]) for choice in job.fresh_choices if choice.index in by_choice]
        prompt_tokens = len(job.request.prompt_ids)
        tokens_possible = all(self._is_possible(choice, token.token_id) for choice, token in drawn)
        possible = first.cached_tokens <= prompt_tokens and tokens_possible
        if job.wants_scores or not possible:
            # Nothing that comes of it can be trusted.
            self._remote.abandon(job, failed=True, tell=True)
            return
        # Its last word says the same, but a stop string may end the request before that comes.
        job.timings.prefill_cached_tokens = first.cached_tokens
        job.note_computed(first.cached_tokens, prompt_tokens)
        for choice, token in drawn:
            if job.request.grammar is not None:
                # Its mask may have been late here, before the prompt was preempted: that state is not ours to touch.
                choice.grammar = job.request.grammar.start()
            self._append(choice, token)

    def _is_possible(self, choice: Sequence, token_id: int) -> bool:
        """Whether a prefill worker of this model may have drawn it."""
        if token_id >= self._limits.vocab_size:
            return False
        grammar = choice.job.request.grammar
        # On a state of its own: the others' tokens may yet turn out wrong.
        return grammar is None or grammar.start().try_accept(token_id)

    def _receive_finished(self, event: ReceiveFinished) -> None:
        job, landed = self._remote.finish(event)
        self._scheduler.remove(job.prompt)
        # Without its first tokens, which never came, the end of the prompt is computed here for its logits.
        # Nor is a prompt done with whose log probabilities did not come.
        if landed and not job.fresh_choices and not job.wants_scores:
            self._prompt_filled(job)
        elif job.open_choices:
            # For the next target, or here; what landed whole is found in the cache.
            job.prompt.table.release()
            self._scheduler.enqueue(job.prompt)
        else:
            job.prompt.table.release()
            self._finish(job, *(job.ending or (Outcome.OK, "")))

    # --- ending ------------------------------------------------------------------------------------

    def _drop(self, sequence: Sequence) -> None:
        """Nothing more is computed for this sequence."""
        self._scheduler.remove(sequence)
        sequence.phase = Phase.DONE
        sequence.table.release()

    def _end(self, job: Job, outcome: Outcome, message: str) -> None:
        """End the request, at once or when its transfer can no longer write."""
        for choice in job.open_choices:
            self._drop(choice)
        if job.transfer is not None:
            job.ending = (outcome, message)
            self._remote.abandon(job, failed=False, tell=True)
        else:
            self._drop(job.prompt)
            self._finish(job, outcome, message)

    def _finish(self, job: Job, outcome: Outcome, message: str) -> None:
        """The one terminal event; the job holds nothing any more."""
        assert not job.holds_blocks, f"request {job.request.request_id} has ended and holds blocks"
        del self._jobs[job.request.key]
        self._meters.figures.count_end(ok=outcome is Outcome.OK, cancelled=outcome is Outcome.CANCELLED)
        request = job.request
        self._outputs.append(
            FinishedOut(
                request.stream,
                *request.key,
                outcome,
                message,
                job.timings,
                prompt_tokens=len(request.prompt_ids),
                output_tokens=sum(len(choice.output_ids) for choice in job.choices),
                total_seconds=self._clock() - job.timings.arrived,
                traceparent=request.traceparent,
            )
        )

    # --- time limits -------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        return self._time_limits.seconds_left(self._jobs.values())

    def _expire(self) -> None:
        for job in self._time_limits.expired(self._jobs.values()):
            if self._time_limits.overruns_grammar(job):
                self._end(job, Outcome.TOO_COMPLEX, "the grammar is too complex: following it takes too long")
            elif self._time_limits.is_overdue(job):
                self._end(job, Outcome.DEADLINE, f"not finished within {job.request.timeout:.3f} s")
            else:
                self._remote.abandon(job, failed=True, tell=True)

    # --- steps -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit what fits and compute one batch. False if there was nothing to compute."""
        self._expire()
        for sequence in self._scheduler.admissible():
            self._start(sequence)
        work = self._scheduler.plan(self._pacer.budget(self._scheduler.context_tokens), self._give_up)
        if work:
            self._compute(work)
        self._flush()
        return bool(work)

    def _give_up(self, sequence: Sequence) -> None:
        """The scheduler wants the blocks of a remote prompt back."""
        sequence.job.timings.preemptions += 1
        self._remote.abandon(sequence.job, failed=False, tell=True)

    def _start(self, sequence: Sequence) -> None:
        """A sequence has its blocks: have it filled elsewhere, or compute it here."""
        job = sequence.job
        if job.timings.admitted is None:
            job.timings.admitted = self._clock()
            job.timings.decode_cached_tokens = sequence.table.num_cached
        self._meters.figures.tokens_cached += sequence.table.num_cached
        if sequence.is_prompt and (found := self._remote.choose(job)) is not None:
            self._scheduler.set_remote(sequence)
            self._remote.start(job, *found)
        else:
            self._scheduler.set_running(sequence)

    def _compute(self, work: Seq[Work]) -> None:
        begun = self._clock()
        draw = self._drawer.start(work)
        logits, scores = self._runner.run_scored([_to_chunk(item) for item in work])
        drawn, late = draw.finish(logits)
        for item, entries in zip(work, scores, strict=True):
            # Who could not draw has its last token computed again, in the same place, when it can.
            end = item.end - 1 if item.sequence in late else item.end
            item.sequence.table.commit(item.sequence.tokens(item.start, end))
            item.sequence.job.note_computed(item.start, item.end)
            if entries:
                whole = self._tell_scores(item.sequence.job, item.start + 1, entries)
                assert whole, f"scored from {item.start} on, with {item.sequence.job.num_scored} entries before"
        for choice, token in drawn:
            self._append(choice, token)
        for item in work:
            self._advance(item.sequence)
        decoded = sum(
            not item.sequence.is_prompt and item.end - item.start == 1 and item.sequence not in late for item in work
        )
        spans = [(item.start, item.end) for item in work]
        self._meters.record_step(spans, decoded=decoded, seconds=self._clock() - begun, postponed=len(late))

    def _tell_scores(self, job: Job, first_position: int, entries: Seq[TokenLogprobs]) -> bool:
        """Log probabilities of prompt tokens, to the gateway. False, and nothing told, if they do not fit."""
        new = job.new_scores(first_position, entries)
        if new is None:
            return False
        if job.wants_scores:
            request = job.request
            parts = in_parts(*new)
            self._outputs += [PromptLogprobsOut(request.stream, *request.key, at, part) for at, part in parts]
            job.num_scored += len(new[1])
        return True

    def _append(self, choice: Sequence, token: SampledToken) -> None:
        """One more output token, told to the client; it may be the last."""
        choice.output_ids.append(token.token_id)
        choice.finish_reason = self._finish_reason(choice)
        if choice.finish_reason is not None:
            choice.phase = Phase.DONE
            choice.grammar = None
        request = choice.job.request
        first_index = len(choice.output_ids) - 1
        self._outputs.append(
            DeltaOut(
                request.stream,
                *request.key,
                choice.index,
                first_index,
                (token,),
                choice.finish_reason,
                choice.job.timings.computed_tokens,
            )
        )

    def _finish_reason(self, choice: Sequence) -> FinishReason | None:
        """Why the choice's last token is its last. At the end of a grammar nothing can follow: that ends the choice
        even if end tokens are to be ignored."""
        params, token_id = choice.job.request.params, choice.output_ids[-1]
        if choice.grammar is not None:
            choice.grammar.push(token_id)
            choice.job.grammar_tokens += 1
            choice.job.grammar_seconds += choice.grammar.take_seconds()
            if choice.grammar.terminated:
                return FinishReason.STOP
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if len(choice.output_ids) >= params.max_tokens or choice.num_tokens >= self._limits.max_request_tokens:
            return FinishReason.LENGTH
        return None

    def _advance(self, sequence: Sequence) -> None:
        """After its tokens were computed: on to the next phase, or out."""
        if sequence.is_prompt:
            if sequence.num_pending == 0:
                job = sequence.job
                job.timings.prefill_worker = self._worker_id
                job.timings.prefill_cached_tokens = 0
                job.timings.prefill_seconds = self._clock() - (job.timings.admitted or job.timings.arrived)
                self._scheduler.remove(sequence)
                self._prompt_filled(job)
        elif sequence.done:
            self._drop(sequence)
            # Choices that ended in this same step give their blocks back one after the other.
            if not sequence.job.open_choices and not sequence.job.holds_blocks:
                self._finish(sequence.job, Outcome.OK, "")
        elif sequence.phase is Phase.FILLING and sequence.num_pending == 1:
            sequence.phase = Phase.DECODING

    def _prompt_filled(self, job: Job) -> None:
        """Give every open choice its blocks: the first takes the prompt's over, the others fork from it."""
        job.timings.prefilled = self._clock()
        prompt, choices = job.prompt, job.open_choices
        prompt.phase = Phase.DONE
        for choice in choices[1:]:
            twin = prompt.table.fork(job.request.prompt_ids, self._runner.kv_cache.copy_block)
            # No block for the copy: it waits, and finds the full blocks in the cache.
            if twin is not None:
                choice.table = twin
        if choices:
            choices[0].table, prompt.table = prompt.table, choices[0].table
        prompt.table.release()
        for choice in choices:
            self._join(choice)
        if not choices:
            self._finish(job, *(job.ending or (Outcome.OK, "")))

    def _join(self, choice: Sequence) -> None:
        """Into the batch if its known tokens fit, else back into the queue."""
        if choice.table.blocks and choice.table.reserve(choice.num_tokens):
            self._scheduler.set_running(choice)
        else:
            choice.table.release()
            self._scheduler.enqueue(choice)

    # --- outputs -----------------------------------------------------------------------------------

    def _send(self, output: DecodeOutput) -> None:
        """Goes out with the rest of this step or command."""
        self._outputs.append(output)

    def _flush(self) -> None:
        self.snapshot = self._take_snapshot()
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._emit(outputs)

    def _take_snapshot(self) -> Snapshot:
        scheduler = self._scheduler
        return self._meters.snapshot(
            self._pool,
            running=scheduler.num_running + scheduler.num_remote,
            waiting=scheduler.num_waiting,
            queued_tokens=scheduler.queued_tokens,
            transfers=self._remote.num_open,
            preemptions=scheduler.num_preemptions,
        )


def _to_chunk(item: Work) -> SequenceChunk:
    sequence, job = item.sequence, item.sequence.job
    # Each position is followed by the next prompt token, but for the very last. What is known is not scored again.
    scored = sequence.is_prompt and job.wants_scores and item.end > job.num_scored
    return SequenceChunk(
        sequence.tokens(item.start, item.end),
        item.start,
        sequence.table.blocks,
        item.wants_logits,
        targets=job.request.prompt_ids[item.start + 1 : item.end + 1] if scored else (),
        num_top=job.request.params.prompt_logprobs or 0,
    )
