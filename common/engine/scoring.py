"""Log probabilities of given tokens in many positions at once, and of the best ones in their place.

What `sampler.logprobs.token_logprobs` says of one drawn token, for whole prompts: same values, same order. Knows no
model; the caller brings logits in slices, so that those of a long prompt are never all there.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from common.sampling import Candidate, TokenLogprobs

#: Elements of logits that are ranked at a time; the keys of so many take 32 MB.
_RANKED_ELEMENTS = 1 << 22
#: Entries that travel or wait together: with the most candidates that may be asked for, less than 2 MB on the wire.
PART_SIZE = 512


def score_tokens(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """One entry per row of raw `logits` [R, vocab], float32: that of `token_ids[row]`, and the `num_top` best, ties by
    lower id. NaN or infinite log probabilities are an assertion."""
    assert logits.shape[0] == len(token_ids) and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    rows = max(1, _RANKED_ELEMENTS // logits.shape[1])
    starts = range(0, len(token_ids), rows)
    return [entry for i in starts for entry in _score(logits[i : i + rows], token_ids[i : i + rows], num_top)]


def _score(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    if num_top:
        ids = torch.cat([ids, _best_ids(logits, min(num_top, logits.shape[1]))], dim=1)
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids)
    assert bool(torch.isfinite(logprobs).all()), "prompt logits have NaN or infinite values"
    entries = []
    for row_ids, row_logprobs in zip(ids.tolist(), logprobs.tolist(), strict=True):
        chosen, *top = map(Candidate, row_ids, row_logprobs)
        entries.append(TokenLogprobs(chosen, tuple(top)))
    return entries


def _best_ids(logits: Tensor, count: int) -> Tensor:
    """int64 [R, count], best first, lower ids first on ties.

    topk settles ties by chance, so it is given keys without any: the logit's bits, as an integer that sorts like the
    float, above the id's complement.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, its equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | (0xFFFFFFFF - ids)
    return 0xFFFFFFFF - (torch.topk(keys, count, dim=-1).values & 0xFFFFFFFF)


def in_parts(first_position: int, entries: Sequence[TokenLogprobs]) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
    """`entries` of successive positions in parts of at most PART_SIZE, each with its first position."""
    for start in range(0, len(entries), PART_SIZE):
        yield first_position + start, tuple(entries[start : start + PART_SIZE])
