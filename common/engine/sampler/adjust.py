"""Everything that changes logits before temperature: bias, min_tokens, penalties, grammar.

Order as in vLLM's v1 sampler: min_tokens mask and logit bias (they commute), repetition penalty, frequency
penalty, presence penalty; the grammar's mask is last, so that nothing brings back what it forbids. All rows of a
batch go through one gather and one scatter per kind; Python touches rows, numpy touches tokens, nothing walks over
the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.sampler.allowed import allows_other_than, apply_allowed
from common.engine.sampler.row import SampleRow

Ids = NDArray[np.int64]
Values = NDArray[np.float32]
#: Row number, token ids and a value for each.
Entry = tuple[int, Ids, Values]


def adjusted(logits: Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int]) -> Tensor:
    """Apply all adjustments to a copy of `logits` [R, vocab]; returns `logits` itself if there are none."""
    stages: list[tuple[list[Entry], Callable[[Tensor, Tensor], Tensor]]] = [
        (list(_biases(rows)), torch.add),
        (list(_masks(rows, eos_token_ids, logits.shape[1])), lambda old, new: new),
        (list(_repetition_penalties(rows)), lambda old, penalty: torch.where(old > 0, old / penalty, old * penalty)),
        (list(_frequency_penalties(rows)), torch.sub),
        (list(_presence_penalties(rows)), torch.sub),
    ]
    if not any(entries for entries, _ in stages) and all(row.allowed is None for row in rows):
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    for entries, change in stages:
        if entries:
            _apply(logits, entries, change)
    apply_allowed(logits, rows)
    return logits


def _apply(logits: Tensor, entries: Sequence[Entry], change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """logits[row, id] = change(logits[row, id], value). An id may repeat in a row if its value is the same."""
    vocab_size = logits.shape[1]
    for row, ids, _ in entries:
        assert ids.min() >= 0 and ids.max() < vocab_size, f"row {row}: token id outside vocabulary of {vocab_size}"
    flat = np.concatenate([row * vocab_size + ids for row, ids, _ in entries])
    index = torch.from_numpy(flat).to(logits.device)
    values = torch.from_numpy(np.concatenate([values for _, _, values in entries])).to(logits.device)
    view = logits.view(-1)
    view[index] = change(view[index], values)


def _biases(rows: Sequence[SampleRow]) -> Iterator[Entry]:
    for number, row in enumerate(rows):
        bias = row.params.logit_bias
        if bias:
            ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
            yield number, ids, np.fromiter(bias.values(), dtype=np.float32, count=len(bias))


def _masks(rows: Sequence[SampleRow], eos_token_ids: Sequence[int], vocab_size: int) -> Iterator[Entry]:
    """Tokens that would end the choice too early. An end token that is ignored ends nothing and stays allowed, but with
    a grammar it does: it is that one's end.

    Where a grammar allows nothing else, they stay allowed too: output that is complete cannot be made longer.
    """
    for number, row in enumerate(rows):
        if row.output_index >= row.params.min_tokens:
            continue
        ends = () if row.params.ignore_eos and row.params.grammar is None else tuple(eos_token_ids)
        ids = np.asarray((*ends, *row.params.stop_token_ids), dtype=np.int64)
        if ids.size and (row.allowed is None or allows_other_than(row.allowed, ids, vocab_size)):
            yield number, ids, np.full(ids.size, -np.inf, dtype=np.float32)


def _repetition_penalties(rows: Sequence[SampleRow]) -> Iterator[Entry]:
    for number, row in enumerate(rows):
        penalty = row.params.repetition_penalty
        if penalty != 1.0:
            ids = np.concatenate([_as_ids(row.prompt_ids), _as_ids(row.output_ids)])
            if ids.size:
                yield number, ids, np.full(ids.size, penalty, dtype=np.float32)


def _frequency_penalties(rows: Sequence[SampleRow]) -> Iterator[Entry]:
    for number, row in enumerate(rows):
        penalty = row.params.frequency_penalty
        if penalty != 0.0 and len(row.output_ids):
            ids, counts = np.unique(_as_ids(row.output_ids), return_counts=True)
            yield number, ids, counts.astype(np.float32) * np.float32(penalty)


def _presence_penalties(rows: Sequence[SampleRow]) -> Iterator[Entry]:
    for number, row in enumerate(rows):
        penalty = row.params.presence_penalty
        if penalty != 0.0 and len(row.output_ids):
            ids = _as_ids(row.output_ids)
            yield number, ids, np.full(ids.size, penalty, dtype=np.float32)


def _as_ids(token_ids: Sequence[int]) -> Ids:
    return np.asarray(token_ids, dtype=np.int64)
