"""Sampling parameters and sampled tokens: the values, without tensors and without protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class FinishReason(Enum):
    """Why a choice ended."""

    #: An end token (an ignored one, too, at the end of a grammar), a stop token or a stop string.
    STOP = "stop"
    #: max_tokens, or the longest context that model or worker can hold.
    LENGTH = "length"


class GrammarKind(Enum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    #: Extended Backus-Naur form as xgrammar (and llama.cpp) read it; the root rule is `root`.
    EBNF = "ebnf"
    #: xgrammar's JSON for "free text in which such a tag is followed by such a grammar": tool calls.
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must match from its first token to its last. `source` is text of that kind."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are drawn; the fields of `generation.proto`, all resolved.

    Together with (logits, choice, output index) these determine each token: `seed` keys a counter-based
    random stream.
    """

    temperature: float = 1.0
    #: In (0, 1]; 1 is off.
    top_p: float = 1.0
    #: 0 is off.
    top_k: int = 0
    #: In [0, 1]; 0 is off.
    min_p: float = 0.0
    #: Unsigned 64 bits.
    seed: int = 0
    max_tokens: int = 16
    #: End and stop tokens are masked until so many tokens are out.
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    #: None: no log probabilities; n: the chosen token's and the n best.
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Over prompt and output; 1 is off.
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: None: any text.
    grammar: GrammarSpec | None = None
    #: None: none; n: each prompt token's (but the first one's) and the n best in its place.
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token id with its natural-log probability under the unmodified model distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one output position: the chosen token and the best ones, best first."""

    chosen: Candidate
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token; `logprobs` is set if the request asked for it."""

    token_id: int
    logprobs: TokenLogprobs | None = None
