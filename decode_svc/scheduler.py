"""Decode policy: who gets blocks, who loses them, and what the next step computes. No tensors.

Decodes go first, one token each, oldest first; what is left of the token budget goes to prompts (and to what a
preemption has to recompute) in chunks. Blocks for known tokens are reserved at admission, so that only decoding
sequences grow; when the pool runs dry, sequences are preempted youngest first and later recomputed, at their old
place in the queue. A request that fits the pool alone always gets through: the oldest is never the victim
while another one holds blocks.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.engine.block_pool import BlockPool
from common.engine.scheduling import TokenBudget
from decode_svc.request import Phase, Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one sequence to compute in this step: positions [start, end)."""

    sequence: Sequence
    start: int
    end: int
    wants_logits: bool


class DecodeScheduler:
    """Sequences are waiting (no blocks), remote (a prefill worker fills them) or running (filling or decoding)."""

    def __init__(
        self, pool: BlockPool, *, max_batch_size: int, watermark_share: float = 0.01, fill_share: float = 0.25
    ) -> None:
        """
        Args:
            watermark_share: part of the pool that admissions leave free, for running sequences to grow into.
            fill_share: part of a step's token budget that prompts get however many sequences decode.
        """
        self._fill_share = fill_share
        self._pool = pool
        self._max_batch_size = max_batch_size
        self._watermark = int(pool.num_blocks * watermark_share)
        self._waiting: list[Sequence] = []
        self._remote: list[Sequence] = []
        self._running: list[Sequence] = []
        #: Sequences that lost their blocks since start.
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_remote(self) -> int:
        return len(self._remote)

    @property
    def queued_tokens(self) -> int:
        """Known tokens that are to be computed here."""
        filling = (s for s in self._running if s.phase is Phase.FILLING)
        return sum(s.num_pending for s in (*self._waiting, *filling))

    @property
    def context_tokens(self) -> int:
        """Tokens that the sequence whose turn to be filled it is has behind it; its next ones attend to them."""
        filling = (s for s in self._running if s.phase is Phase.FILLING)
        return next((s.table.num_computed for s in filling), 0)

    def enqueue(self, sequence: Sequence) -> None:
        """Into the queue, at the place of its age. It holds no blocks."""
        assert not sequence.table.blocks, f"a waiting sequence holds {len(sequence.table.blocks)} blocks"
        sequence.phase = Phase.WAITING
        bisect.insort(self._waiting, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is; phase and table stay the caller's."""
        for group in (self._waiting, self._remote, self._running):
            if sequence in group:
                group.remove(sequence)

    def admissible(self) -> Iterator[Sequence]:
        """Waiting sequences in order, each with blocks reserved for all its known tokens, as far as they fit.

        The caller says for each where it goes: `set_remote` or `set_running`.
        """
        while self._waiting and self._has_seat(self._waiting[0]) and self._reserve(self._waiting[0]):
            yield self._waiting.pop(0)

    def set_remote(self, sequence: Sequence) -> None:
        sequence.phase = Phase.REMOTE
        bisect.insort(self._remote, sequence, key=_age)

    def set_running(self, sequence: Sequence) -> None:
        """The sequence has its blocks and is computed here from now on."""
        decoding = not sequence.is_prompt and sequence.num_pending == 1
        sequence.phase = Phase.DECODING if decoding else Phase.FILLING
        bisect.insort(self._running, sequence, key=_age)

    def _has_seat(self, sequence: Sequence) -> bool:
        taken = sum(_seats(other) for other in (*self._running, *self._remote))
        return taken == 0 or taken + _seats(sequence) <= self._max_batch_size

    def _reserve(self, sequence: Sequence) -> bool:
        """Pin the cached prefix (where it is of use) and reserve the rest, leaving the watermark unless nothing else
        holds blocks."""
        table, count = sequence.table, sequence.num_tokens
        if sequence.reads_cache:
            table.adopt_prefix(sequence.tokens(0, count), sequence.hashes(self._pool.block_size))
        decoding = sum(1 for s in self._running if s.phase is Phase.DECODING)
        spare = max(self._watermark, decoding) if self._running or self._remote else 0
        if self._pool.num_available - table.missing(count) >= spare and table.reserve(count):
            return True
        table.release()
        return False

    # --- one step ----------------------------------------------------------------------------------

    def plan(self, budget: int, give_up: Callable[[Sequence], None]) -> list[Work]:
        """What the next step computes, in about `budget` tokens; everything in it has its blocks.

        `give_up(sequence)` is called for a remote prompt whose blocks are wanted: its transfer is to be abandoned
        and the prompt requeued when nothing can be written to its blocks any more.
        """
        decoding = [s for s in self._running if s.phase is Phase.DECODING]
        filling = [s for s in self._running if s.phase is Phase.FILLING]
        work: list[Work] = []
        for sequence in decoding:
            # A younger one may have been preempted for an older one just now.
            if sequence.phase is Phase.DECODING and self._make_room(sequence, give_up):
                work.append(_work(sequence, 1))
        # A stream never waits for a budget; and many streams never starve the prompts.
        fill = TokenBudget(max(budget - len(work), int(budget * self._fill_share)))
        for sequence in filling:
            if sequence.phase is Phase.FILLING and (count := fill.take(sequence.num_pending)):
                work.append(_work(sequence, count))
        return work

    def _make_room(self, sequence: Sequence, give_up: Callable[[Sequence], None]) -> bool:
        """A block for the next token of `sequence`, if need be by preempting younger ones. False: not in this step."""
        while not sequence.table.reserve(sequence.num_tokens):
            if self._blocks_are_coming() or self._gives_up_younger_prompt(sequence, give_up):
                # Blocks of a transfer come back when it has ended, not now.
                return False
            victim = self._running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _blocks_are_coming(self) -> bool:
        return any(s.job.transfer is not None and s.job.transfer.abandoned for s in self._remote)

    def _gives_up_younger_prompt(self, sequence: Sequence, give_up: Callable[[Sequence], None]) -> bool:
        if not self._remote or self._remote[-1].age < sequence.age:
            return False
        self.num_preemptions += 1
        give_up(self._remote[-1])
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it is recomputed when there is room again."""
        self._running.remove(sequence)
        sequence.table.release()
        sequence.job.timings.preemptions += 1
        self.num_preemptions += 1
        self.enqueue(sequence)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age


def _seats(sequence: Sequence) -> int:
    """Places in the batch that it takes, now or once its choices fork from it."""
    return len(sequence.job.open_choices) if sequence.is_prompt else 1


def _work(sequence: Sequence, count: int) -> Work:
    start = sequence.table.num_computed
    end = start + count
    ends = end == sequence.num_tokens
    wants_logits = ends and (bool(sequence.job.fresh_choices) if sequence.is_prompt else True)
    return Work(sequence, start, end, wants_logits)
