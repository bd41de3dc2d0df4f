"""Log probabilities of a chosen token and of the best ones, under the unmodified model distribution."""

import torch
from torch import Tensor

from common.sampling import Candidate, TokenLogprobs


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """For raw `logits` [vocab], float32: the chosen token's, and the `num_top` best, ties by lower id."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top_ids = _best_ids(logits, min(num_top, logits.shape[0])) if num_top else logits.new_empty(0, dtype=torch.int64)
    ids = torch.cat([top_ids.new_tensor([token_id]), top_ids])
    chosen, *top = (Candidate(i, v) for i, v in zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return TokenLogprobs(chosen, tuple(top))


def _best_ids(logits: Tensor, count: int) -> Tensor:
    """int64 [count]. topk alone would settle ties by chance."""
    last = torch.topk(logits, count).values[-1]
    ids = torch.nonzero(logits >= last)[:, 0]
    order = torch.sort(logits[ids], descending=True, stable=True).indices
    return ids[order[:count]]
