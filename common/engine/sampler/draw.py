"""From adjusted logits to a random token: temperature, min_p, top_k, top_p, and the inverse CDF.

Order as in vLLM's v1 sampler: temperature, then min_p, then top_k, then top_p over what top_k left. The tokens of
a row have one strict order, better logit first and lower id on ties, so top_k keeps exactly k tokens and every
filter keeps a head of that order. The draw itself runs over probabilities in token-id order in float64.

On the CPU every step is either elementwise, sequential along a row or done per row, so that a row's token does
not depend on its batch, to the bit. Other devices sort whole rows at once, which is what they are good at.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.sampler.randomness import uniforms
from common.engine.sampler.row import SampleRow
from common.sampling import SamplingParams

#: Elements that are worked on at a time on the CPU: float64 temporaries of 1.5 MB stay in the caches, and the
#: allocator keeps their pages, where those of a whole batch would be mapped anew, page by page, in every step.
_CPU_SLICE = 3 << 16


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Draw a token id for each row of `logits` [R, vocab], float32, whose row maxima are finite."""
    size = max(1, _CPU_SLICE // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
    starts = range(0, len(rows), size)
    return [token for i in starts for token in _draw_slice(logits[i : i + size], rows[i : i + size])]


def _draw_slice(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    params = [row.params for row in rows]
    probs = filtered_probabilities(logits, params)
    numbers = uniforms([p.seed for p in params], [r.choice for r in rows], [r.output_index for r in rows])
    return inverse_cdf(probs, torch.from_numpy(numbers).to(logits.device))


def filtered_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """float64 [R, vocab]: softmax of logits / temperature, 0 where a filter removed the token; not renormalized."""
    probs = _probabilities(logits, [p.temperature for p in params])
    _apply_min_p(probs, [p.min_p for p in params])
    cut = [row for row, param in enumerate(params) if _has_cut(param, logits.shape[1])]
    if logits.device.type == "cpu":
        for row in cut:
            cut_row(logits[row].numpy(), probs[row].numpy(), params[row])
    elif cut:
        probs = cut_rows(logits, probs, params)
    return probs


def _probabilities(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """float64 [R, vocab] softmax of logits / temperature.

    A float32 divided by the smallest temperature that is not greedy is far from float64's limits, and softmax
    subtracts the maximum, so nothing overflows.
    """
    return torch.softmax(logits / _column(temperatures, logits.device), dim=-1)


def _apply_min_p(probs: Tensor, min_ps: Sequence[float]) -> None:
    """Zero in place what is less likely than min_p times the best token."""
    if any(min_ps):
        floor = probs.amax(dim=-1, keepdim=True) * _column(min_ps, probs.device)
        probs.masked_fill_(probs < floor, 0.0)


def _has_cut(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size


def cut_row(logits: NDArray[np.float32], probs: NDArray[np.float64], params: SamplingParams) -> None:
    """Apply top_k and top_p to one row [vocab], after min_p: zero in place the probabilities of what they remove.

    Only values are sorted, and only those that can matter; ties at the end of the head are settled by id.
    """
    vocab_size = len(logits)
    # Mass of all that is left, in units of the best token's, where it is not just the head.
    whole = None
    if 0 < params.top_k < vocab_size:
        head = torch.from_numpy(logits).topk(params.top_k, sorted=False).values.numpy()
    elif params.min_p > 0.0:
        head = logits[np.flatnonzero(probs)]
    else:
        # Tokens below this floor have less than 1 - top_p together: the nucleus never reaches them.
        head = logits[np.flatnonzero(probs >= (1.0 - params.top_p) / vocab_size)]
        whole = 1.0 / float(probs.max())
    head = np.sort(head)[::-1]
    count = _nucleus_size(head, whole, params) if params.top_p < 1.0 else len(head)
    _keep_best(logits, probs, head[count - 1], count)


def _nucleus_size(head: NDArray[np.float32], whole: float | None, params: SamplingParams) -> int:
    """How many of `head` (logits, best first) it takes until they hold top_p of the mass."""
    weights = np.exp((head.astype(np.float64) - np.float64(head[0])) / params.temperature)
    weights[weights < params.min_p] = 0.0
    mass = np.cumsum(weights)
    wanted = params.top_p * (mass[-1] if whole is None else whole)
    return min(int(np.searchsorted(mass, wanted)) + 1, len(head))


def _keep_best(logits: NDArray[np.float32], probs: NDArray[np.float64], last: np.float32, count: int) -> None:
    """Zero all but the `count` best tokens, the worst of which has logit `last`."""
    keep = logits >= last
    excess = int(np.count_nonzero(keep)) - count
    if excess > 0:
        ties = np.flatnonzero(logits == last)
        keep[ties[len(ties) - excess :]] = False
    probs *= keep


def cut_rows(logits: Tensor, probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`cut_row` for all rows [R, vocab] at once, by a full sort; returns the probabilities that are left."""
    vocab_size = logits.shape[1]
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ranked = probs.gather(-1, order)
    rank = torch.arange(vocab_size, device=logits.device)
    ranked *= rank < _column([p.top_k or vocab_size for p in params], logits.device)
    mass = ranked.cumsum(dim=-1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    top_ps = _column([p.top_p for p in params], logits.device)
    # A token stays while those before it fall short of top_p; the best one always does. top_p = 1 keeps all.
    ranked *= (before < top_ps * mass[:, -1:]) | (top_ps >= 1.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def inverse_cdf(probs: Tensor, numbers: Tensor) -> list[int]:
    """First token id, in id order, at which the cumulative mass passes number * total; rows need not sum to 1."""
    cdf = probs.cumsum(dim=-1)
    total = cdf[:, -1:]
    # Rounding may lift number * total up to the total itself, past which there is no token.
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, target, right=True)
    # A parallel cumsum need not be flat where probabilities are 0: never draw a token that was removed.
    removed = probs.gather(-1, tokens) == 0.0
    if bool(removed.any()):
        tokens = torch.where(removed, probs.argmax(dim=-1, keepdim=True), tokens)
    return [int(token) for token in tokens[:, 0].tolist()]


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
