"""What both workers refuse at once, because it could never be served or would break an engine.

The gateway has validated already; workers check what they would otherwise assert, since any peer may speak to them.
"""

import math
from collections.abc import Sequence

from common.errors import InvalidRequest
from common.sampling import SamplingParams

#: Larger penalties and biases could drive logits to infinity; smaller repetition penalties too, as divisors.
MAX_ADJUSTMENT = 1e4
MAX_LOGPROBS = 100


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    """Raise InvalidRequest unless there is a token and all are in the vocabulary. Ids are unsigned."""
    if len(token_ids) == 0:
        raise InvalidRequest("no tokens", field=field)
    if max(token_ids) >= vocab_size:
        raise InvalidRequest(f"token id {max(token_ids)} is outside the vocabulary of {vocab_size}", field=field)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest naming the parameter that the sampler could not work with."""
    ranges = (
        ("temperature", 0.0 <= params.temperature < math.inf),
        ("top_p", 0.0 < params.top_p <= 1.0),
        ("min_p", 0.0 <= params.min_p <= 1.0),
        ("repetition_penalty", 1.0 / MAX_ADJUSTMENT <= params.repetition_penalty <= MAX_ADJUSTMENT),
        ("presence_penalty", abs(params.presence_penalty) <= MAX_ADJUSTMENT),
        ("frequency_penalty", abs(params.frequency_penalty) <= MAX_ADJUSTMENT),
        ("max_tokens", params.max_tokens >= 1),
        ("min_tokens", params.min_tokens <= params.max_tokens),
        ("logprobs", params.logprobs is None or params.logprobs <= min(MAX_LOGPROBS, vocab_size)),
        ("prompt_logprobs", params.prompt_logprobs is None or params.prompt_logprobs <= min(MAX_LOGPROBS, vocab_size)),
        ("logit_bias", all(token < vocab_size for token in params.logit_bias)),
        ("logit_bias", all(abs(bias) <= MAX_ADJUSTMENT for bias in params.logit_bias.values())),
        ("stop_token_ids", all(token < vocab_size for token in params.stop_token_ids)),
        # They are masked until min_tokens are out, and something must be left to draw then.
        ("stop_token_ids", len(set(params.stop_token_ids)) <= vocab_size // 2),
    )
    for name, fine in ranges:
        if not fine:
            raise InvalidRequest(f"{name} {getattr(params, name)!r} is out of range", field=name)


def check_grammar(params: SamplingParams, *, compiled: bool) -> None:
    """Raise InvalidRequest for a grammar that is in `params` alone: the output would be any text."""
    if params.grammar is not None and not compiled:
        raise InvalidRequest("the grammar has not been compiled", field="grammar")
