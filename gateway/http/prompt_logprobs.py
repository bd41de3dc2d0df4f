"""`prompt_logprobs` in vLLM's shape, for every API that offers it. Knows no request.

A list with one entry per prompt token: null for the first, which nothing precedes, then objects
`{token id: {"logprob", "rank", "decoded_token"}}` of the prompt's own token and the most likely ones in its place.
`rank` counts from 1 and is known for the most likely ones; that of the prompt's own token is null if it is not one of
them. `decoded_token` and values are written as in `logprobs`.
"""

from collections.abc import Iterator, Sequence

from common.errors import InvalidRequest
from common.sampling import Candidate, TokenLogprobs
from common.text.tokenizer import Tokenizer
from gateway.http.formats import Json
from gateway.http.logprobs import finite
from gateway.pace import rows_per_part


def refuse_streamed(prompt_logprobs: int | None, *, stream: bool | None) -> None:
    """They belong to an answer in one piece, as in vLLM. Raises InvalidRequest."""
    if stream and prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs are not available with stream", field="prompt_logprobs")


def prompt_logprobs_json(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenLogprobs], count: int
) -> Iterator[list[Json | None]]:
    """The list, in parts.

    Args:
        scores: of the prompt's tokens from the second on.
        count: how many of the most likely ones to show; `scores` may hold more.
    """
    assert len(scores) == len(prompt_ids) - 1, f"{len(scores)} scores for {len(prompt_ids)} prompt tokens"
    yield [None]
    each = rows_per_part(1 + count)
    for start in range(0, len(scores), each):
        yield [dict(_entries(tokenizer, score, count)) for score in scores[start : start + each]]


def _entries(tokenizer: Tokenizer, score: TokenLogprobs, count: int) -> Iterator[tuple[str, Json]]:
    """The prompt's own token first."""
    ranks = {candidate.token_id: rank for rank, candidate in enumerate(score.top, 1)}
    own = score.chosen.token_id
    yield str(own), _entry(tokenizer, score.chosen, ranks.get(own))
    for rank, candidate in enumerate(score.top[:count], 1):
        if candidate.token_id != own:
            yield str(candidate.token_id), _entry(tokenizer, candidate, rank)


def _entry(tokenizer: Tokenizer, candidate: Candidate, rank: int | None) -> Json:
    return {
        "logprob": finite(candidate.logprob),
        "rank": rank,
        "decoded_token": tokenizer.token_text(candidate.token_id),
    }
