"""The prefill engine: chunked prefill with the KV of each layer sent while the next ones compute.

Life of a job, all on the engine thread:

1. `Run` arrives: validated, queued.
2. Admitted: blocks reserved, the cached prefix found; its KV goes out at once.
3. Each step computes a chunk; after each layer the transfer thread is told that the layer's KV is final. The chunk's
   prompt log probabilities are reported if they are asked for; such a prompt is computed whole.
4. After the last chunk the first token of each wanted choice is drawn and reported, and the send is closed.
5. `SendFinished` comes from the transfer thread: blocks go back to the pool (still cached), `Ended` is reported.

Cancel, a lost peer and a failed write lead to step 5 from wherever the job is.
"""

import time
from collections.abc import Callable, Sequence

import torch

from common.engine.batch import SequenceChunk
from common.engine.block_pool import BlockPool
from common.engine.block_table import BlockTable
from common.engine.grammar import LATE, GrammarState, MaskFiller, PendingMasks
from common.engine.meters import Meters, Snapshot
from common.engine.runner import ModelRunner
from common.engine.sampler import Sampler, SampleRow
from common.engine.scheduling import StepPacer, TokenBudget
from common.engine.scoring import in_parts
from common.errors import InvalidRequest
from common.hashing import block_hashes
from common.request_checks import check_grammar, check_sampling, check_token_ids
from common.sampling import TokenLogprobs
from kv_store.transfer.events import PeerLost, SendFinished
from kv_store.transfer.worker import KVTransfer
from prefill_svc.request import (
    Cancel,
    Ended,
    FirstTokens,
    PeerGone,
    PrefillJob,
    PrefillOutput,
    PrefillRequest,
    Progressed,
    PromptLogprobs,
    Run,
)
from prefill_svc.scheduler import Chunk, PrefillScheduler

#: How often a prompt that waits for its turn gives a sign of life.
REASSURE_SECONDS = 2.0

_OUTCOMES = {"ok": "ok", "aborted": "cancelled", "failed": "failed"}


class PrefillEngine:
    """Everything that the engine thread owns: pool, scheduler, runner, sampler and the jobs.

    `emit` gets the outputs of each step or command in one call and must not block.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        sampler: Sampler,
        masks: MaskFiller,
        pool: BlockPool,
        transfer: KVTransfer,
        pacer: StepPacer,
        max_batch_size: int,
        max_prompt_tokens: int,
        vocab_size: int,
        max_waiting: int,
        emit: Callable[[Sequence[PrefillOutput]], None],
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._masks = masks
        self._pool = pool
        self._transfer = transfer
        self._pacer = pacer
        self._scheduler = PrefillScheduler(max_batch_size=max_batch_size)
        self._max_prompt_tokens = max_prompt_tokens
        self._vocab_size = vocab_size
        self._max_waiting = max_waiting
        self._emit = emit
        self._num_layers = runner.kv_cache.spec.num_layers
        self._jobs: dict[tuple[str, int], PrefillJob] = {}
        self._outputs: list[PrefillOutput] = []
        self._meters = Meters(pacer)
        self._reassured = time.monotonic()
        self.snapshot = self._take_snapshot()

    # --- commands ----------------------------------------------------------------------------------

    def handle(self, command: object) -> None:
        match command:
            case Run(request):
                self._accept(request)
            case Cancel(peer, transfer_id):
                self._cancel(peer, transfer_id)
            case PeerGone(peer):
                self._peer_gone(peer)
            case SendFinished():
                self._send_finished(command)
            case PeerLost():
                # The pair's stream tells the same; a lost peer's sends end by SendFinished.
                pass
            case _:
                raise AssertionError(f"unknown command {type(command).__name__}")
        self._flush()

    def next_deadline(self) -> float | None:
        # A line that does not move (blocks wait for slow transfers) must go on being reassured.
        return REASSURE_SECONDS if self._scheduler.num_waiting else None

    def _accept(self, request: PrefillRequest) -> None:
        key = (request.peer, request.transfer_id)
        refusal = self._refusal(request)
        if refusal is not None:
            outcome, message = refusal
            self._outputs.append(Ended(request.peer, request.transfer_id, outcome, message))
            return
        hashes = block_hashes(request.prompt_ids, self._pool.block_size, request.cache_salt)
        table = BlockTable(self._pool, request.cache_salt)
        job = PrefillJob(request, table, hashes, arrived=time.monotonic())
        self._jobs[key] = job
        self._scheduler.add(job)
        self._meters.figures.accepted += 1

    def _refusal(self, request: PrefillRequest) -> tuple[str, str] | None:
        # Of whichever peer: the transfer knows sends by this id alone.
        if any(request.transfer_id == transfer_id for _, transfer_id in self._jobs):
            return "rejected", f"transfer {request.transfer_id} is already running"
        length = len(request.prompt_ids)
        if not 0 < length <= self._max_prompt_tokens:
            return "rejected", f"a prompt of {length} tokens; this worker holds 1 to {self._max_prompt_tokens}"
        if not 0 <= request.first_token < length:
            return "rejected", f"first_token {request.first_token} is outside a prompt of {length} tokens"
        try:
            check_token_ids(request.prompt_ids, self._vocab_size, field="prompt_ids")
            check_sampling(request.params, self._vocab_size)
            check_grammar(request.params, compiled=request.grammar is not None)
        except InvalidRequest as error:
            return "rejected", f"{error.field}: {error.message}"
        if self._scheduler.num_waiting >= self._max_waiting:
            return "shortage", f"{self._max_waiting} prompts are waiting already"
        return None

    def _cancel(self, peer: str, transfer_id: int) -> None:
        job = self._jobs.get((peer, transfer_id))
        if job is None or job.cancelled:
            return
        job.cancelled = True
        self._scheduler.remove(job)
        if job.admitted is None:
            self._end(job, Ended(peer, transfer_id, "cancelled"))
        else:
            self._transfer.abort_send(transfer_id)

    def _peer_gone(self, peer: str) -> None:
        for key in [key for key in self._jobs if key[0] == peer]:
            self._cancel(*key)

    def _send_finished(self, event: SendFinished) -> None:
        job = self._jobs.get((event.peer, event.transfer_id))
        assert job is not None, f"send {event.transfer_id} to {event.peer} finished twice or was never opened"
        self._scheduler.remove(job)
        outcome = "cancelled" if job.cancelled else _OUTCOMES[event.outcome]
        now = time.monotonic()
        # What is not computed to the end has hidden nothing and exposed nothing.
        last_layer = job.last_layer if job.computed and job.last_layer is not None else now
        self._end(
            job,
            Ended(
                event.peer,
                event.transfer_id,
                outcome,
                event.reason,
                messages=event.messages,
                bytes=event.bytes,
                cached_tokens=job.table.num_cached,
                computed_tokens=job.table.num_computed - job.table.num_cached,
                prefill_seconds=last_layer - job.arrived,
                since_compute_seconds=now - last_layer,
                transfer_seconds=event.transfer_seconds,
            ),
        )

    def _end(self, job: PrefillJob, ended: Ended) -> None:
        del self._jobs[(ended.peer, ended.transfer_id)]
        job.table.release()
        self._meters.figures.count_end(ok=ended.outcome == "ok", cancelled=ended.outcome == "cancelled")
        self._outputs.append(ended)

    # --- steps -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit what fits and compute one batch of chunks. False if there was nothing to compute."""
        for job in self._scheduler.admit():
            self._start(job)
        self._reassure()
        chunks = self._scheduler.next_chunks(TokenBudget(self._pacer.budget(self._scheduler.context_tokens)))
        if chunks:
            self._compute(chunks)
        self._flush()
        return bool(chunks)

    def _reassure(self) -> None:
        """Tell now and then that waiting prompts are not forgotten: silence reads as death at the other end."""
        now = time.monotonic()
        if now - self._reassured < REASSURE_SECONDS:
            return
        self._reassured = now
        for job in self._scheduler.waiting:
            self._outputs.append(Progressed(job.request.peer, job.request.transfer_id, 0))

    def _start(self, job: PrefillJob) -> None:
        """Open the send, and let the cached part of the prefix travel first."""
        request = job.request
        job.admitted = time.monotonic()
        self._meters.figures.tokens_cached += job.table.num_cached
        self._transfer.open_send(request.transfer_id, request.peer, job.num_prompt_tokens, request.first_token)
        sent_as = self._begin_send(job, 0, job.table.num_cached)
        if sent_as is not None:
            self._transfer.layers_ready([sent_as], self._num_layers)

    def _begin_send(self, job: PrefillJob, start: int, end: int) -> int | None:
        """Announce [start, end) to the transfer thread, less what the peer holds; None if nothing is left."""
        start = max(start, job.request.first_token)
        if start >= end:
            return None
        return self._transfer.begin_chunk(job.request.transfer_id, start, job.table.slots(start, end))

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        begun = time.monotonic()
        sends = [chunk_id for c in chunks if (chunk_id := self._begin_send(c.job, c.start, c.end)) is not None]

        def layer_done(layer: int, event: torch.cuda.Event | None) -> None:
            self._transfer.layers_ready(sends, layer + 1, event)
            if layer + 1 == self._num_layers:
                now = time.monotonic()
                for chunk in chunks:
                    chunk.job.last_layer = now

        drawing = [chunk.job for chunk in chunks if _wants_logits(chunk)]
        # Beside the forward pass. Every choice begins at the grammar's beginning, so that one mask serves them all.
        masks = self._masks.start([_start_of_grammar(job) for job in drawing])
        sequence_chunks = [_to_sequence_chunk(chunk) for chunk in chunks]
        logits, scores = self._runner.run_scored(sequence_chunks, layer_done if sends else None)
        for chunk, entries in zip(chunks, scores, strict=True):
            self._report_scores(chunk, entries)
        self._draw_first_tokens(drawing, masks, logits)
        for chunk in chunks:
            self._advance(chunk)
        spans = [(chunk.start, chunk.end) for chunk in chunks]
        self._meters.record_step(spans, decoded=0, seconds=time.monotonic() - begun)

    def _report_scores(self, chunk: Chunk, entries: Sequence[TokenLogprobs]) -> None:
        request = chunk.job.request
        for first_position, part in in_parts(chunk.start + 1, entries):
            self._outputs.append(PromptLogprobs(request.peer, request.transfer_id, first_position, part))

    def _draw_first_tokens(self, jobs: Sequence[PrefillJob], masks: PendingMasks, logits: torch.Tensor) -> None:
        """One logits row and one mask per job, several choices per row; each choice has its own random stream."""
        rows = []
        for index, (job, allowed) in enumerate(zip(jobs, masks.wait(), strict=True)):
            assert allowed is not LATE, "masks are waited for without end"
            rows += [
                (index, SampleRow(job.request.params, choice, 0, job.request.prompt_ids, (), allowed))
                for choice in job.request.first_choices
            ]
        if not rows:
            return
        sampled = iter(self._sampler.sample(logits[[index for index, _ in rows]], [row for _, row in rows]))
        for job in jobs:
            tokens = [(choice, next(sampled)) for choice in job.request.first_choices]
            self._outputs.append(FirstTokens(job.request.peer, job.request.transfer_id, tokens, job.table.num_cached))

    def _advance(self, chunk: Chunk) -> None:
        job = chunk.job
        job.table.commit(job.request.prompt_ids[chunk.start : chunk.end])
        if chunk.last:
            job.computed = True
            self._scheduler.remove(job)
            self._transfer.close_send(job.request.transfer_id)
        else:
            self._outputs.append(Progressed(job.request.peer, job.request.transfer_id, chunk.end))

    # --- outputs -----------------------------------------------------------------------------------

    def _flush(self) -> None:
        self.snapshot = self._take_snapshot()
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._emit(outputs)

    def _take_snapshot(self) -> Snapshot:
        # Every job with blocks has a send open, from its first chunk to its end.
        running = len(self._jobs) - self._scheduler.num_waiting
        return self._meters.snapshot(
            self._pool,
            running=running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.queued_tokens,
            transfers=running,
        )


def _to_sequence_chunk(chunk: Chunk) -> SequenceChunk:
    request = chunk.job.request
    num_top = request.params.prompt_logprobs
    return SequenceChunk(
        request.prompt_ids[chunk.start : chunk.end],
        chunk.start,
        chunk.job.table.blocks,
        wants_logits=_wants_logits(chunk),
        # Each position is followed by the next prompt token, but for the very last.
        targets=() if num_top is None else request.prompt_ids[chunk.start + 1 : chunk.end + 1],
        num_top=num_top or 0,
    )


def _start_of_grammar(job: PrefillJob) -> GrammarState | None:
    return None if job.request.grammar is None else job.request.grammar.start()


def _wants_logits(chunk: Chunk) -> bool:
    return chunk.last and bool(chunk.job.request.first_choices)
