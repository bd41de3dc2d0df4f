"""What came out of one request so far, over all its attempts: contiguous, without repeats, as its reader takes it.

Deltas are put in by plain calls and never wait: a slow reader finds the tokens of each choice merged, so what is held
is bounded by max_tokens. It gets them in parts, with turns of the event loop between them: what it does with each part
takes time in proportion.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from common.errors import TandemError
from common.pb.tandem.v1 import decode_pb2 as pb
from common.pb.tandem.v1 import generation_pb2
from common.rpc.convert import finish_from_proto, logprobs_from_proto
from common.sampling import FinishReason, TokenLogprobs
from gateway.dispatch.prompt_scores import PromptScores
from gateway.generation import GenerationStats, TokenDelta
from gateway.pace import PART, Pace, rows_per_part


@dataclass(slots=True)
class _Choice:
    """One choice: all its tokens, and those that the reader has not taken yet."""

    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cancelled: bool = False
    #: Output index up to which the reader has everything.
    taken: int = 0
    #: Of the tokens from `taken` on, if asked for.
    logprobs: list[generation_pb2.TokenLogprobs] = field(default_factory=list)
    #: Listed in the buffer's line.
    queued: bool = False

    @property
    def ended(self) -> bool:
        return self.cancelled or self.finish_reason is not None

    @property
    def columns(self) -> int:
        """What a token is worth in work: itself and its log probabilities."""
        return 2 + len(self.logprobs[0].top) if self.logprobs else 1


class Output:
    """The Generation that the edge reads. Its Job puts in deltas and the end."""

    def __init__(
        self,
        num_choices: int,
        *,
        num_prompt_logprobs: int = 0,
        on_cancel_choice: Callable[[int], None],
        on_close: Callable[[], None],
    ) -> None:
        """`num_prompt_logprobs`: entries that are to come before the first delta."""
        self._num_prompt_logprobs = num_prompt_logprobs
        self._choices = [_Choice() for _ in range(num_choices)]
        self._on_cancel_choice = on_cancel_choice
        self._on_close = on_close
        #: Choices with something to take, in the order in which it came.
        self._line: deque[int] = deque()
        self._news = asyncio.Event()
        self._over = False
        self._error: TandemError | None = None
        self._stats: GenerationStats | None = None
        self._prompt_logprobs = PromptScores()
        self._pace = Pace(PART)

    # --- for the reader (gateway.generation.Generation) ----------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            await self._pace.turn()
            while self._line:
                if (delta := self._take(self._line.popleft())) is not None:
                    return delta
            if self._over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    def cancel_choice(self, choice: int) -> None:
        state = self._choices[choice]
        if state.cancelled:
            return
        told = state.ended
        state.cancelled = True
        if not told and not self._over:
            self._on_cancel_choice(choice)

    async def aclose(self) -> None:
        if not self._over:
            self._over = True
            self._news.set()
            self._on_close()

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        return self._prompt_logprobs

    @property
    def stats(self) -> GenerationStats | None:
        return self._stats

    def _take(self, index: int) -> TokenDelta | None:
        choice = self._choices[index]
        choice.queued = False
        if choice.cancelled:
            return None
        first, count = choice.taken, rows_per_part(choice.columns)
        ids = tuple(choice.output_ids[first : first + count])
        logprobs = tuple(map(logprobs_from_proto, choice.logprobs[:count]))
        self._pace.count(len(ids) * choice.columns)
        choice.taken += len(ids)
        del choice.logprobs[:count]
        if choice.taken < len(choice.output_ids):
            self._announce(index)
            return TokenDelta(index, first, ids, logprobs)
        return TokenDelta(index, first, ids, logprobs, choice.finish_reason)

    # --- for the job ---------------------------------------------------------------------------------

    def put_prompt_logprobs(self, delta: pb.PromptLogprobsDelta) -> bool:
        """Take in those of prompt tokens. Those that are already there are skipped; False if some before them are
        missing, or if they are more than was asked for."""
        known = len(self._prompt_logprobs) + 1 - delta.first_position
        last_position = delta.first_position + len(delta.entries) - 1
        if delta.first_position < 1 or known < 0 or last_position > self._num_prompt_logprobs:
            return False
        self._prompt_logprobs.extend(delta.entries[known:])
        return True

    @property
    def has_prompt_logprobs(self) -> bool:
        """All that were asked for are there."""
        return len(self._prompt_logprobs) == self._num_prompt_logprobs

    def put(self, delta: pb.Delta) -> bool:
        """Take in new tokens. Tokens that are already there are skipped; False if some before them are missing, or
        log probabilities of the prompt."""
        if not self.has_prompt_logprobs:
            return False
        choice = self._choices[delta.choice] if delta.choice < len(self._choices) else None
        if choice is None:
            return False
        if choice.ended:
            # Nobody kept count of what came meanwhile.
            return True
        if delta.first_index > len(choice.output_ids):
            return False
        known = len(choice.output_ids) - delta.first_index
        fresh = delta.token_ids[known:]
        choice.output_ids += fresh
        choice.logprobs += delta.logprobs[known:]
        choice.finish_reason = finish_from_proto(delta.finish_reason)
        if fresh or choice.ended:
            self._announce(delta.choice)
        return True

    def _announce(self, index: int) -> None:
        choice = self._choices[index]
        if not choice.queued:
            choice.queued = True
            self._line.append(index)
        self._news.set()

    @property
    def prefixes(self) -> list[pb.ChoicePrefix]:
        """Where a replay goes on."""
        return [pb.ChoicePrefix(output_ids=choice.output_ids, finished=choice.ended) for choice in self._choices]

    @property
    def output_ids(self) -> Sequence[Sequence[int]]:
        """Tokens so far, per choice."""
        return [choice.output_ids for choice in self._choices]

    @property
    def all_ended(self) -> bool:
        return all(choice.ended for choice in self._choices)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.output_ids) for choice in self._choices)

    def finish(self, stats: GenerationStats) -> None:
        """The request has ended well."""
        if not self._over:
            self._stats = stats
            self._over = True
            self._news.set()

    def fail(self, error: TandemError) -> None:
        """The request has failed for good; the reader still gets what is buffered, then the error."""
        if not self._over:
            self._error = error
            self._over = True
            self._news.set()
