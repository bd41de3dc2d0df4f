"""A request on the decode worker: its sequences, their blocks, how far each is. Values; no tensors, no protobuf."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum

from common.engine.block_table import BlockTable
from common.engine.grammar import Grammar, GrammarState
from common.hashing import BlockHash, block_hashes
from common.sampling import FinishReason, SamplingParams, TokenLogprobs
from decode_svc.token_ranges import TokenRanges


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """A prefill worker that may be asked, as the gateway ranked it."""

    worker_id: str
    address: str


@dataclass(frozen=True, slots=True)
class ChoicePrefix:
    """What the client already has of one choice (a replay); empty and unfinished at first."""

    output_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What the gateway submits; see SubmitRequest in decode.proto."""

    #: The gateway stream it came on; answers go there.
    stream: str
    request_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    choices: tuple[ChoicePrefix, ...]
    params: SamplingParams
    prefill_targets: tuple[PrefillTarget, ...] = ()
    cache_salt: str = ""
    traceparent: str = ""
    #: Seconds it may take from now; None: no limit.
    timeout: float | None = None
    #: `params.grammar`, compiled.
    grammar: Grammar | None = None

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)


class Phase(Enum):
    """Where a sequence is."""

    #: A choice whose prompt is not there yet.
    BLOCKED = "blocked"
    #: In the queue, without blocks: never admitted yet, or preempted.
    WAITING = "waiting"
    #: A prompt whose reserved blocks a prefill worker is filling.
    REMOTE = "remote"
    #: Known tokens are being computed here: a prompt, forced output, or all of it after a preemption.
    FILLING = "filling"
    #: One token a step.
    DECODING = "decoding"
    #: Nothing more is computed for it; it has no blocks.
    DONE = "done"


#: Index of the sequence that brings the prompt's KV in, before any choice exists.
PROMPT = -1


class Sequence:
    """Tokens that share one block table: the bare prompt, or the prompt and one choice's output.

    Attributes:
        index: the choice's index, or PROMPT.
        output_ids: drawn or forced so far (none for the bare prompt).
        table: its blocks; `table.num_computed` of its tokens have their KV in them.
        grammar: where `output_ids` have led to in the request's grammar; None without one, and when it is done.
    """

    def __init__(self, job: "Job", index: int, table: BlockTable, phase: Phase, output_ids: Seq[int] = ()) -> None:
        self.job = job
        self.index = index
        self.table = table
        self.phase = phase
        self.output_ids = list(output_ids)
        self.finish_reason: FinishReason | None = None
        self.grammar: GrammarState | None = None
        self._hashes: tuple[int, Seq[BlockHash]] = (0, ())

    @property
    def is_prompt(self) -> bool:
        return self.index == PROMPT

    @property
    def done(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.job.request.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return self.num_tokens - self.table.num_computed

    @property
    def age(self) -> tuple[int, int]:
        """Sorts sequences, oldest first; kept over preemptions."""
        return (self.job.order, self.index)

    @property
    def reads_cache(self) -> bool:
        """A prompt with tokens to be scored is computed whole: nothing remembers the scores of cached ones."""
        return not (self.is_prompt and self.job.wants_scores)

    def hashes(self, block_size: int) -> Seq[BlockHash]:
        """Hashes of the full blocks of all known tokens; kept while the sequence waits for its turn."""
        count, hashes = self._hashes
        if count != self.num_tokens:
            count = self.num_tokens
            hashes = block_hashes(self.tokens(0, count), block_size, self.job.request.cache_salt)
            self._hashes = (count, hashes)
        return hashes

    def tokens(self, start: int, end: int) -> Seq[int]:
        """Known tokens at positions [start, end)."""
        prompt = self.job.request.prompt_ids
        split = len(prompt)
        if end <= split:
            return prompt[start:end]
        if start >= split:
            return self.output_ids[start - split : end - split]
        return (*prompt[start:], *self.output_ids[: end - split])


@dataclass(slots=True)
class Transfer:
    """The remote prefill that is filling a job's prompt blocks."""

    transfer_id: int
    target: PrefillTarget
    #: Prompt tokens that are sent: [first_token, len(prompt)).
    first_token: int
    #: time.monotonic() of its start and of the last sign of life.
    started: float
    heard: float
    #: time.monotonic() when, by the prefill worker's account, its last layer was computed.
    compute_ended: float = 0.0
    #: No longer wanted; its blocks are held until nothing can be written to them any more.
    abandoned: bool = False


@dataclass(slots=True)
class Timings:
    """What goes into the request's stats; seconds and time.monotonic() values."""

    arrived: float
    admitted: float | None = None
    prefilled: float | None = None
    decode_cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    #: Prompt tokens computed for the request, here or by a prefill worker, each once: what an attempt that was given up
    #: left in a cache was computed for it, too.
    computed_tokens: int = 0
    transfer_bytes: int = 0
    transfer_messages: int = 0
    transfer_exposed_seconds: float = 0.0
    transfer_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_worker: str = ""
    preemptions: int = 0
    prefill_retries: int = 0


class Outcome(Enum):
    """How an accepted request ended."""

    OK = "ok"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    #: Its grammar takes more time than a request may.
    TOO_COMPLEX = "too_complex"
    FAILED = "failed"


class Job:
    """A request inside the engine.

    `prompt` is filled first, here or by a prefill worker; then every unfinished choice gets its blocks from it.
    """

    def __init__(self, request: DecodeRequest, *, arrived: float, order: int, tables: Seq[BlockTable]) -> None:
        """`tables`: empty ones, one for the prompt and one per choice."""
        self.request = request
        #: Place in the queue: lower is older.
        self.order = order
        self.prompt = Sequence(self, PROMPT, tables[0], Phase.WAITING)
        self.choices = [
            Sequence(self, i, table, Phase.DONE if prefix.finished else Phase.BLOCKED, prefix.output_ids)
            for i, (prefix, table) in enumerate(zip(request.choices, tables[1:], strict=True))
        ]
        self.transfer: Transfer | None = None
        #: First of the prefill targets that has not been tried.
        self.next_target = 0
        self.deadline = None if request.timeout is None else arrived + request.timeout
        self.timings = Timings(arrived)
        self._computed = TokenRanges()
        #: Prompt tokens whose log probabilities the gateway has, from the second one on.
        self.num_scored = 0
        #: Output tokens, forced ones too, along which its grammar is followed here, and the processor time that took.
        self.grammar_tokens = sum(len(prefix.output_ids) for prefix in request.choices if not prefix.finished)
        self.grammar_seconds = 0.0
        #: How it is to end, once that is decided and only a transfer is still in the way.
        self.ending: tuple[Outcome, str] | None = None

    def note_computed(self, start: int, end: int) -> None:
        """Positions [start, end) were computed, somewhere; those beyond the prompt are of no interest."""
        prompt = len(self.request.prompt_ids)
        if start < prompt:
            self._computed.add(start, min(end, prompt))
            self.timings.computed_tokens = self._computed.count

    @property
    def wants_scores(self) -> bool:
        """Log probabilities of prompt tokens are asked for and not all there yet."""
        return self.request.params.prompt_logprobs is not None and self.num_scored < len(self.request.prompt_ids) - 1

    def new_scores(self, first_position: int, entries: Seq[TokenLogprobs]) -> tuple[int, Seq[TokenLogprobs]] | None:
        """What of `entries`, of the prompt's tokens from `first_position` on, the gateway has not got yet: a prompt
        that is computed again is scored again. None if some before them are missing, or they are too many."""
        known = self.num_scored + 1 - first_position
        if first_position < 1 or known < 0 or first_position + len(entries) > len(self.request.prompt_ids):
            return None
        return first_position + known, entries[known:]

    @property
    def fresh_choices(self) -> list[Sequence]:
        """Choices that want their first token drawn from the prompt's last logits."""
        return [choice for choice in self.choices if not choice.done and not choice.output_ids]

    @property
    def holds_blocks(self) -> bool:
        return any(sequence.table.blocks for sequence in (self.prompt, *self.choices))

    @property
    def open_choices(self) -> list[Sequence]:
        return [choice for choice in self.choices if not choice.done]
