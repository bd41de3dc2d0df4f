"""What goes into the decode engine and what comes out of it. Values only; the service turns them into protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.grammar import Grammar
from common.sampling import FinishReason, SampledToken, SamplingParams, TokenLogprobs
from decode_svc.request import DecodeRequest, Outcome, PrefillTarget, Timings

# --- commands --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Take a request over. `draining`: this worker takes nothing new, so the answer is a shortage."""

    request: DecodeRequest
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a request, or one choice of it; unknown ones are ignored (they have ended)."""

    request_id: str
    attempt: int
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class StreamGone:
    """A gateway's stream has closed: nobody waits for its requests any more."""

    stream: str


@dataclass(frozen=True, slots=True)
class FirstArrived:
    """First tokens from a prefill worker, by choice."""

    transfer_id: int
    tokens: Sequence[tuple[int, SampledToken]]
    #: Prompt tokens that the prefill worker did not have to compute.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobsArrived:
    """Those of prompt tokens from `first_position` on, from a prefill worker."""

    transfer_id: int
    first_position: int
    entries: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class PrefillProgressed:
    transfer_id: int


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill worker's Terminal, or the loss of its stream (`ok` False)."""

    transfer_id: int
    ok: bool
    message: str
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefill_seconds: float = 0.0
    transfer_seconds: float = 0.0
    #: time.monotonic() here when, by the prefill worker's account, its last layer was computed.
    compute_ended: float = 0.0


# --- outputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceptedOut:
    stream: str
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RejectedOut:
    stream: str
    request_id: str
    attempt: int
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class ShortageOut:
    stream: str
    request_id: str
    attempt: int
    message: str
    retry_after: float


@dataclass(frozen=True, slots=True)
class PromptLogprobsOut:
    """Those of prompt tokens from `first_position` on: a bounded number, without gaps or repeats, before any delta."""

    stream: str
    request_id: str
    attempt: int
    first_position: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class DeltaOut:
    stream: str
    request_id: str
    attempt: int
    choice: int
    first_index: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None
    #: Prompt tokens of the request computed so far, as in Timings.
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedOut:
    """The one terminal event of an accepted request; nothing is held for it any more."""

    stream: str
    request_id: str
    attempt: int
    outcome: Outcome
    message: str
    timings: Timings
    prompt_tokens: int
    output_tokens: int
    total_seconds: float
    traceparent: str


@dataclass(frozen=True, slots=True)
class RunOut:
    """Ask a prefill worker for the KV of [first_token, len(prompt_ids))."""

    target: PrefillTarget
    transfer_id: int
    request_id: str
    prompt_ids: tuple[int, ...]
    first_token: int
    first_choices: tuple[int, ...]
    params: SamplingParams
    cache_salt: str
    traceparent: str
    #: `params.grammar`, compiled.
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class CancelOut:
    """Tell a prefill worker to stop; its Terminal still follows."""

    target: PrefillTarget
    transfer_id: int


GatewayOut = AcceptedOut | RejectedOut | ShortageOut | PromptLogprobsOut | DeltaOut | FinishedOut
PrefillOut = RunOut | CancelOut
DecodeOutput = GatewayOut | PrefillOut
