r"""Log probabilities in the shapes of the two OpenAI APIs.

There is one entry for each token that usage counts, the end token and those of a stop string included. A token that
is only a part of a character is written `bytes:\xNN...`; chat entries have its bytes as well. Values are finite:
minus infinity is written as -9999, as vLLM does.
"""

from collections.abc import Iterable, Iterator, Sequence

from common.sampling import Candidate, TokenLogprobs
from common.text.tokenizer import Tokenizer
from gateway.completion import TextToken
from gateway.http.echo import Echo
from gateway.http.formats import Json
from gateway.pace import rows_per_part

_LOWEST = -9999.0


def finite(logprob: float) -> float:
    """A value that JSON can hold and that is at most 0; rounding may have left it a hair above."""
    return max(min(logprob, 0.0), _LOWEST) if logprob == logprob else _LOWEST


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TextToken]) -> list[Json]:
    """One entry for each token, as chat choices (`logprobs.content`) and responses hold them."""
    return [_chat_entry(tokenizer, token) for token in tokens]


def _chat_entry(tokenizer: Tokenizer, token: TextToken) -> Json:
    logprobs = _known(token)
    top = [_chat_candidate(tokenizer, candidate) for candidate in logprobs.top]
    return _chat_candidate(tokenizer, logprobs.chosen) | {"top_logprobs": top}


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
        "token_logprobs": [finite(_known(token).chosen.logprob) for token in tokens],
        "top_logprobs": [_top_by_text(tokenizer, _known(token), None) for token in tokens],
        "text_offset": [first_offset + token.offset for token in tokens],
    }


def echo_logprobs(
    tokenizer: Tokenizer, echo: Echo, scores: Sequence[TokenLogprobs], count: int
) -> Iterator[tuple[str, Json]]:
    """The same of an echoed prompt with its text, in parts that follow each other.

    The first token, which nothing precedes, has null.

    Args:
        scores: of the prompt's tokens from the second on.
        count: how many of the most likely ones to show; `scores` may hold more.
    """
    num_tokens = len(echo.token_ids)
    assert len(scores) == num_tokens - 1, f"{len(scores)} scores for {num_tokens} prompt tokens"
    each = rows_per_part(2 + count)
    for start in range(0, num_tokens, each):
        part = slice(start, start + each)
        text_begin = echo.offsets[start] if start else 0
        text_end = echo.offsets[start + each] if start + each < num_tokens else len(echo.text)
        unscored = [None] if start == 0 else []
        known = scores[max(0, start - 1) : start + each - 1]
        yield (
            echo.text[text_begin:text_end],
            {
                "tokens": [tokenizer.token_text(token_id) for token_id in echo.token_ids[part]],
                "token_logprobs": [*unscored, *(finite(score.chosen.logprob) for score in known)],
                "top_logprobs": [*unscored, *(_top_by_text(tokenizer, score, count) for score in known)],
                "text_offset": list(echo.offsets[part]),
            },
        )


def joined_logprobs(first: Json, second: Json) -> Json:
    """Two `logprobs` of a completion, one after the other; of lists or of `JsonList`s."""
    return {name: first[name] + second[name] for name in first}


def _known(token: TextToken) -> TokenLogprobs:
    assert token.logprobs is not None, f"token {token.token_id} came without log probabilities"
    return token.logprobs


def _top_by_text(tokenizer: Tokenizer, logprobs: TokenLogprobs, count: int | None) -> dict[str, float]:
    candidates = (*logprobs.top[:count], logprobs.chosen)
    return {tokenizer.token_text(candidate.token_id): finite(candidate.logprob) for candidate in candidates}
