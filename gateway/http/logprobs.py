r"""Log probabilities in the shapes of the two OpenAI APIs.

There is one entry for each token that usage counts, the end token and those of a stop string included. A token that
is only a part of a character is written `bytes:\xNN...`; chat entries have its bytes as well. Values are finite:
minus infinity is written as -9999, as vLLM does.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from common.sampling import Candidate
from common.text.tokenizer import Tokenizer
from gateway.completion import TextToken

_LOWEST = -9999.0

Json = dict[str, Any]


def finite(logprob: float) -> float:
    """A value that JSON can hold and that is at most 0; rounding may have left it a hair above."""
    return max(min(logprob, 0.0), _LOWEST) if logprob == logprob else _LOWEST


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TextToken]) -> Json:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_entry(tokenizer, token) for token in tokens], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token: TextToken) -> Json:
    assert token.logprobs is not None, f"token {token.token_id} came without log probabilities"
    top = [_chat_candidate(tokenizer, candidate) for candidate in token.logprobs.top]
    return _chat_candidate(tokenizer, token.logprobs.chosen) | {"top_logprobs": top}


def _chat_candidate(tokenizer: Tokenizer, candidate: Candidate) -> Json:
    return {
        "token": tokenizer.token_text(candidate.token_id),
        "logprob": finite(candidate.logprob),
        "bytes": list(tokenizer.token_bytes(candidate.token_id)),
    }


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken], first_offset: int) -> Json:
    """`logprobs` of a completion choice; the chosen token is among `top_logprobs` even if it is not of the best.

    Args:
        first_offset: characters in front of the choice's own text (the echoed prompt).
    """
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": [finite(token.logprobs.chosen.logprob) for token in tokens if token.logprobs is not None],
        "top_logprobs": [_top_by_text(tokenizer, token) for token in tokens],
        "text_offset": [first_offset + token.offset for token in tokens],
    }


def _top_by_text(tokenizer: Tokenizer, token: TextToken) -> dict[str, float]:
    assert token.logprobs is not None, f"token {token.token_id} came without log probabilities"
    candidates = (*token.logprobs.top, token.logprobs.chosen)
    return {tokenizer.token_text(candidate.token_id): finite(candidate.logprob) for candidate in candidates}
