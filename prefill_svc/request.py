"""A prompt that a decode worker wants the KV of, and how far it is. Plain values; no tensors, no protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.block_table import BlockTable
from common.engine.grammar import Grammar
from common.hashing import BlockHash
from common.sampling import SampledToken, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """What a decode worker asks for; see RunRequest in prefill.proto."""

    #: Incarnation of the decode worker.
    peer: str
    transfer_id: int
    request_id: str
    prompt_ids: tuple[int, ...]
    #: KV of [first_token, len(prompt_ids)) is sent.
    first_token: int
    #: Choices whose first output token is wanted.
    first_choices: tuple[int, ...]
    params: SamplingParams
    cache_salt: str
    traceparent: str
    #: `params.grammar`, compiled.
    grammar: Grammar | None = None


@dataclass(slots=True)
class PrefillJob:
    """A request inside the engine."""

    request: PrefillRequest
    table: BlockTable
    hashes: Sequence[BlockHash]
    #: time.monotonic() when it came and was admitted.
    arrived: float
    admitted: float | None = None
    #: The whole prompt is computed.
    computed: bool = False
    #: time.monotonic() when the last layer of its latest chunk had its KV.
    last_layer: float | None = None
    cancelled: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_remaining(self) -> int:
        return self.num_prompt_tokens - self.table.num_computed

    @property
    def reads_cache(self) -> bool:
        """A prompt whose tokens are scored is computed whole: nothing remembers the scores of cached ones."""
        return self.request.params.prompt_logprobs is None


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first output token of each wanted choice."""

    peer: str
    transfer_id: int
    tokens: Sequence[tuple[int, SampledToken]]
    #: Prompt tokens that were found in the prefix cache.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Those of the prompt's tokens from `first_position` on, a bounded number; all of them come before FirstTokens."""

    peer: str
    transfer_id: int
    first_position: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Progressed:
    peer: str
    transfer_id: int
    tokens_done: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal event of a request: nothing of it is being written any more."""

    peer: str
    transfer_id: int
    #: "ok", "cancelled", "shortage", "rejected" or "failed".
    outcome: str
    message: str = ""
    messages: int = 0
    bytes: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefill_seconds: float = 0.0
    since_compute_seconds: float = 0.0
    transfer_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GrammarWanted:
    """The grammar of this Run, of which only the digest came, is not kept here."""

    peer: str
    transfer_id: int


PrefillOutput = FirstTokens | PromptLogprobs | Progressed | Ended | GrammarWanted


@dataclass(frozen=True, slots=True)
class Run:
    """Command: take over a request."""

    request: PrefillRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Command: stop one transfer of a peer; unknown ones are ignored (they have ended)."""

    peer: str
    transfer_id: int


@dataclass(frozen=True, slots=True)
class PeerGone:
    """Command: the stream to this decode worker has closed."""

    peer: str
