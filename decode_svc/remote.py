"""Remote prefills of a decode worker: which prefill worker is asked, and what becomes of each transfer.

Lives on the engine thread. Decides nothing about requests: it says whether a prompt has landed, the engine goes on.
"""

from collections.abc import Callable
from dataclasses import replace

from decode_svc.messages import CancelOut, PrefillEnded, PrefillOut, RunOut
from decode_svc.request import Job, PrefillTarget, Transfer
from kv_store.transfer.events import ReceiveFinished
from kv_store.transfer.worker import KVTransfer


class RemotePrefills:
    """Transfers by id, from `start` to `finish`; a job has at most one.

    A transfer that is not wanted any more is *abandoned*: nothing of it is used, and its blocks are held until
    `finish`, because only then nothing can be written to them.
    """

    def __init__(
        self,
        *,
        transfer: KVTransfer,
        find_peer: Callable[[str], str | None],
        local_prefill_tokens: int,
        first_transfer_id: int,
        emit: Callable[[PrefillOut], None],
        clock: Callable[[], float],
    ) -> None:
        self._transfer = transfer
        self._find_peer = find_peer
        self._local_prefill_tokens = local_prefill_tokens
        self._next_transfer_id = first_transfer_id
        self._emit = emit
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        #: Those whose prefill worker has not had its last word; it may come after everything else has ended.
        self._unreported: dict[int, Job] = {}

    @property
    def num_open(self) -> int:
        return len(self._jobs)

    def choose(self, job: Job) -> tuple[PrefillTarget, str] | None:
        """The best untried target that is paired and has slots to write into, with its incarnation; None: prefill
        here."""
        if job.prompt.num_pending <= self._local_prefill_tokens:
            return None
        while job.next_target < len(job.request.prefill_targets):
            target = job.request.prefill_targets[job.next_target]
            job.next_target += 1
            peer = self._find_peer(target.address)
            if peer is not None and self._transfer.can_receive_from(peer):
                return target, peer
        return None

    def start(self, job: Job, target: PrefillTarget, peer: str) -> None:
        """The prompt's blocks are reserved; let the prefill worker fill what the cache did not have."""
        request, table = job.request, job.prompt.table
        now = self._clock()
        transfer_id, self._next_transfer_id = self._next_transfer_id, self._next_transfer_id + 1
        job.transfer = Transfer(transfer_id, target, table.num_computed, started=now, heard=now)
        self._jobs[transfer_id] = self._unreported[transfer_id] = job
        slots = table.slots(table.num_computed, len(request.prompt_ids))
        self._transfer.open_receive(transfer_id, peer, table.num_computed, slots)
        # What the gateway has already would be computed in vain, and keep the prefill worker from its cache.
        params = request.params if job.wants_scores else replace(request.params, prompt_logprobs=None)
        self._emit(
            RunOut(
                target,
                transfer_id,
                request.request_id,
                request.prompt_ids,
                table.num_computed,
                tuple(choice.index for choice in job.fresh_choices),
                params,
                request.cache_salt,
                request.traceparent,
                request.grammar,
            )
        )

    def hear(self, transfer_id: int) -> Job | None:
        """Note a sign of life; the job, if the transfer is still wanted."""
        job = self._jobs.get(transfer_id)
        if job is None or job.transfer is None or job.transfer.abandoned:
            return None
        job.transfer.heard = self._clock()
        return job

    def ended(self, event: PrefillEnded) -> None:
        """The prefill worker's last word: note its figures, or give the transfer up."""
        unreported = self._unreported.pop(event.transfer_id, None)
        if unreported is not None:
            # Also of a transfer that was given up: what was computed for it may be found in a cache by the next one.
            unreported.note_computed(event.cached_tokens, event.cached_tokens + event.computed_tokens)
        job = self.hear(event.transfer_id)
        if job is None:
            return
        assert job.transfer is not None
        if not event.ok:
            self.abandon(job, failed=True, tell=False)
            return
        job.transfer.compute_ended = event.compute_ended
        timings = job.timings
        timings.prefill_worker = job.transfer.target.worker_id
        timings.prefill_cached_tokens = event.cached_tokens
        timings.prefill_seconds = event.prefill_seconds
        timings.transfer_seconds = event.transfer_seconds

    def abandon(self, job: Job, *, failed: bool, tell: bool) -> None:
        """Stop waiting for the job's transfer, if it has one.

        Args:
            failed: the prefill worker is at fault, so the next one is asked; else it may be asked again.
            tell: whether it is still at work and has to be told.
        """
        transfer = job.transfer
        if transfer is None or transfer.abandoned:
            return
        transfer.abandoned = True
        if failed:
            job.timings.prefill_retries += 1
        else:
            job.next_target -= 1
        if tell:
            self._emit(CancelOut(transfer.target, transfer.transfer_id))
        self._transfer.abort_receive(transfer.transfer_id)

    def finish(self, event: ReceiveFinished) -> tuple[Job, bool]:
        """Nothing is written to the job's blocks any more; whether the prompt's KV is whole, and committed."""
        job = self._jobs.pop(event.transfer_id, None)
        assert job is not None and job.transfer is not None, f"receive {event.transfer_id} ended twice"
        transfer, job.transfer = job.transfer, None
        if transfer.abandoned:
            return job, False
        if event.outcome != "ok":
            # It failed on this side; the prefill worker need not go on.
            job.timings.prefill_retries += 1
            self._emit(CancelOut(transfer.target, transfer.transfer_id))
            return job, False
        timings = job.timings
        timings.transfer_bytes, timings.transfer_messages = event.bytes, event.messages
        timings.transfer_exposed_seconds = max(0.0, event.last_landed - transfer.compute_ended)
        job.prompt.table.commit(job.request.prompt_ids[transfer.first_token :])
        return job, True
