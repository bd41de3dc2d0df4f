"""From what a scheduler decided (Python ints) to what a model runs (flat tensors, no padding of tokens)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The tokens of one sequence that are computed in this step."""

    #: Tokens to compute, in order.
    token_ids: Sequence[int]
    #: Position of the first of them = tokens of the sequence whose KV is already in its blocks.
    start: int
    #: The sequence's blocks, covering at least positions [0, start + len(token_ids)).
    block_table: Sequence[int]
    #: Whether the logits after the last token are wanted.
    wants_logits: bool
    #: Tokens that are to be scored: targets[i] in the place that follows token_ids[i]. At most as many as token_ids.
    targets: Sequence[int] = ()
    #: Best tokens that are wanted beside each target.
    num_top: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over T tokens of S sequences, flattened.

    Sequences that compute one token (decodes) and longer chunks (prefills) may be mixed in any order.
    """

    #: int64 [T].
    token_ids: Tensor
    #: int64 [T], position of each token in its sequence.
    positions: Tensor
    #: int64 [T], block * block_size + offset: where each token's K and V go.
    slot_mapping: Tensor
    #: int32 [S, most blocks of any sequence]; rows are padded with 0, which is never read past seq_lens.
    block_tables: Tensor
    #: int32 [S + 1], prefix sums of the chunk lengths.
    cu_seqlens_q: Tensor
    #: int32 [S], context length of each sequence, this step's tokens included.
    seq_lens: Tensor
    #: int64 [R], rows of the hidden states whose logits are wanted, in the order of the chunks.
    logits_indices: Tensor
    #: int64 [N], rows whose next tokens are scored, in the order of the chunks.
    scored_indices: Tensor
    #: Longest chunk and longest context.
    max_query_len: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.seq_lens.shape[0])


def build_batch(chunks: Sequence[SequenceChunk], block_size: int, device: torch.device) -> Batch:
    """Flatten `chunks` (at least one, none empty) into tensors on `device`."""
    lengths = np.fromiter((len(c.token_ids) for c in chunks), dtype=np.int64, count=len(chunks))
    starts = np.fromiter((c.start for c in chunks), dtype=np.int64, count=len(chunks))
    assert len(chunks) > 0 and lengths.min() > 0, "an empty batch or chunk"
    cu_seqlens = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    seq_lens = starts + lengths

    tables = np.zeros((len(chunks), max(len(c.block_table) for c in chunks)), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        assert len(chunk.block_table) * block_size >= chunk.end, "block table shorter than its sequence"
        row[: len(chunk.block_table)] = chunk.block_table

    token_ids = np.concatenate([np.asarray(c.token_ids, dtype=np.int64) for c in chunks])
    sequence_of = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(len(token_ids)) - cu_seqlens[sequence_of] + starts[sequence_of]
    slots = tables[sequence_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    wanted = np.fromiter((c.wants_logits for c in chunks), dtype=bool, count=len(chunks))
    logits_indices = cu_seqlens[1:][wanted].astype(np.int64) - 1

    def place(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        host = torch.from_numpy(array)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    return Batch(
        token_ids=place(token_ids),
        positions=place(positions),
        slot_mapping=place(slots),
        block_tables=place(tables),
        cu_seqlens_q=place(cu_seqlens),
        seq_lens=place(seq_lens.astype(np.int32)),
        logits_indices=place(logits_indices),
        scored_indices=torch.from_numpy(_scored_rows(chunks, cu_seqlens)).to(device),
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
    )


def _scored_rows(chunks: Sequence[SequenceChunk], cu_seqlens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rows that are followed by a target."""
    assert all(len(c.targets) <= len(c.token_ids) for c in chunks), "more tokens to score than are computed"
    rows = [
        np.arange(first, first + len(c.targets)) for first, c in zip(cu_seqlens[:-1], chunks, strict=True) if c.targets
    ]
    return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
