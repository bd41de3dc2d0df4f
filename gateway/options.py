"""What a caller may ask of a generation, as values: None where nothing was said. Knows no API and no default."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.sampling import GrammarSpec
from gateway.generation import RequestClass


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Unchecked options under their documented names; `gateway.validation` checks and completes them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    #: Signed 64 bits; None draws one.
    seed: int | None = None
    #: None: the rest of the context.
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    #: None: none; n: the chosen token's and the n most likely ones'.
    logprobs: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    #: None: no salt; an empty one is refused.
    cache_salt: str | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE
    #: Lower is earlier, among the waiting requests of the same tenant and class.
    priority: int | None = None
    #: What the output must match; already checked (`gateway.structured`).
    grammar: GrammarSpec | None = None
    #: None: none; n: each prompt token's and the n most likely ones'.
    prompt_logprobs: int | None = None
    #: Seconds that the whole request may take.
    timeout: float | None = None
