"""What the API edges (HTTP, gRPC) ask of the dispatcher, and what they get back: token ids, no text."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from common.sampling import FinishReason, SamplingParams, TokenLogprobs


class RequestClass(Enum):
    """How urgent a request is; interactive ones are admitted first."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request. `params.max_tokens` already respects the context length."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    num_choices: int = 1
    tenant: str = "default"
    request_class: RequestClass = RequestClass.INTERACTIVE
    #: Lower is earlier, among the waiting requests of the same tenant and class.
    priority: int = 0
    cache_salt: str = ""
    #: Seconds the whole request may take; None: no limit.
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one choice, in order and without gaps or repeats, whatever attempts it took."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    #: As many as token_ids, or none.
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Figures of a finished request (see RequestStats in generation.proto). Durations in seconds.

    After a fail-over they are those of the last attempt, but for `output_tokens` and `cached_tokens`, which are over
    all attempts: what one computed for the request and the next one found in a cache is not cached. Of an attempt
    that was lost before its first token nothing is known.
    """

    prompt_tokens: int
    output_tokens: int
    #: Prompt tokens that no worker computed for this request.
    cached_tokens: int
    #: Every field of RequestStats by name, for logs, metrics and the gRPC API.
    details: Mapping[str, float | int | str] = field(default_factory=dict)


class Generation(Protocol):
    """One accepted request. Iterating yields deltas and ends after each choice has finished.

    Iteration raises a TandemError if the request fails for good (NoWorker, DeadlineExceeded, ...).
    """

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    def cancel_choice(self, choice: int) -> None:
        """Stop one choice (its stop string was met): no delta of it follows. Not blocking; idempotent."""
        ...

    async def aclose(self) -> None:
        """Cancel whatever still runs and free it everywhere. Idempotent; must be called on every path."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """If asked for: those of the prompt's tokens from the second on. Complete when the first delta comes."""
        ...

    @property
    def stats(self) -> GenerationStats | None:
        """Set once the iteration has ended well."""
        ...


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What requests must respect now."""

    #: Longest prompt plus output in tokens that some live worker holds (model's own limit if none is known).
    max_request_tokens: int
    vocab_size: int


class Dispatcher(Protocol):
    """Admission, routing and retries behind one call."""

    async def submit(self, request: GenerationRequest) -> Generation:
        """Queue, route and hand over; returns once a worker has accepted.

        Raises InvalidRequest (the worker refused it, field named), Overloaded or RateLimited (with
        retry_after), NoWorker, DeadlineExceeded.
        """
        ...

    def limits(self) -> ServingLimits: ...
