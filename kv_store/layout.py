"""The wire form of KV, `[layer][K|V][tokens][kv_heads][head_dim]`, and the copies between it and pages.

Knows shapes, slots and bytes; knows nothing of peers, messages' headers or who owns a page. A flat slot of a
token is `block * block_size + offset`, so block sizes never show on the wire.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Slots = NDArray[np.int64]
#: A numpy view whose elements are whole token rows (void dtype); typed loosely because numpy cannot name it.
_Rows = NDArray[Any]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What both sides of a pair must agree on for bytes to mean the same."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, pages: Tensor) -> "KVShape":
        """The shape of `pages` [num_layers, 2, num_blocks, block_size, kv_heads, head_dim]."""
        assert pages.dim() == 6 and pages.shape[1] == 2, f"not KV pages: {tuple(pages.shape)}"
        assert pages.is_contiguous(), f"pages must be contiguous, strides are {pages.stride()}"
        return cls(pages.shape[0], pages.shape[4], pages.shape[5], pages.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of K (or of V) of one token in one layer."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.row_bytes

    def message_bytes(self, num_layers: int, num_tokens: int) -> int:
        return num_layers * num_tokens * self.token_layer_bytes


@dataclass(frozen=True, slots=True)
class MessageRange:
    """The rectangle of (layer, token) that one message carries; tokens count from the start of its chunk."""

    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int


def plan_messages(
    shape: KVShape, first_layer: int, num_layers: int, num_tokens: int, slot_bytes: int
) -> Iterator[MessageRange]:
    """Cut layers [first_layer, +num_layers) of `num_tokens` tokens into messages of at most `slot_bytes`.

    Short token ranges travel several layers to a message, longer ones layer by layer, and a layer that does
    not fit is split evenly by tokens.
    """
    assert slot_bytes >= shape.token_layer_bytes, f"a slot of {slot_bytes} holds no token of {shape}"
    group = slot_bytes // shape.message_bytes(1, num_tokens)
    if group > 0:
        for layer in range(first_layer, first_layer + num_layers, group):
            yield MessageRange(layer, min(group, first_layer + num_layers - layer), 0, num_tokens)
        return
    parts = -(-num_tokens // (slot_bytes // shape.token_layer_bytes))
    bounds = [num_tokens * part // parts for part in range(parts + 1)]
    for layer in range(first_layer, first_layer + num_layers):
        for start, end in pairwise(bounds):
            yield MessageRange(layer, 1, start, end - start)


class PageCopier:
    """Gathers tokens of some pages into wire form and scatters them back; both are done when the call returns.

    On the CPU the copies are single-threaded numpy (they release the GIL and never touch the engine's OpenMP
    threads); on a GPU they run on a stream of their own, which only the calling thread waits for.
    """

    def __init__(self, pages: Tensor) -> None:
        self.shape = KVShape.of(pages)
        self.num_slots = pages.shape[2] * pages.shape[3]
        #: What rows are copied as: on a GPU the widest words that a row is made of.
        self._word = _widest_word(self.shape.row_bytes) if pages.is_cuda else torch.uint8
        self._stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None  # type: ignore[no-untyped-call]
        #: [num_layers, 2, num_slots, words of a row].
        self._flat = pages.view(self._word).view(pages.shape[0], 2, self.num_slots, -1)
        if not pages.is_cuda:
            self._rows = _as_rows(self._flat.numpy())

    def check_slots(self, slots: Sequence[int] | Slots) -> Slots:
        """`slots` as int64 [t]; an assertion names the one that lies outside the pages."""
        array = np.asarray(slots, dtype=np.int64)
        if array.size:
            low, high = int(array.min()), int(array.max())
            assert low >= 0 and high < self.num_slots, f"slots {low}..{high} outside of [0, {self.num_slots})"
        return array

    def gather(self, first_layer: int, num_layers: int, slots: Slots, out: Tensor) -> None:
        """Copy K and V of `slots` in those layers into `out` (uint8, exactly the message's bytes)."""
        rows = self._wire_view(out, num_layers, len(slots))
        layers = slice(first_layer, first_layer + num_layers)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                index = torch.from_numpy(slots).to(out.device)
                torch.index_select(self._flat[layers], 2, index, out=rows)
            self._stream.synchronize()
        else:
            # `clip` lets numpy copy straight into `out`; check_slots has seen these slots before.
            np.take(self._flat[layers].numpy(), slots, axis=2, out=rows.numpy(), mode="clip")

    def scatter(self, first_layer: int, num_layers: int, slots: Slots, wire: Tensor) -> None:
        """The inverse of `gather`: copy `wire` into those layers at `slots` (distinct)."""
        rows = self._wire_view(wire, num_layers, len(slots))
        layers = slice(first_layer, first_layer + num_layers)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._flat[layers].index_copy_(2, torch.from_numpy(slots).to(wire.device), rows)
            self._stream.synchronize()
        else:
            self._rows[layers, :, slots] = _as_rows(rows.numpy())

    def _wire_view(self, wire: Tensor, num_layers: int, num_tokens: int) -> Tensor:
        expected = self.shape.message_bytes(num_layers, num_tokens)
        assert wire.dtype == torch.uint8 and wire.numel() == expected, f"{wire.numel()} bytes, expected {expected}"
        return wire.view(self._word).view(num_layers, 2, num_tokens, -1)


def as_slots(slots: ArrayLike) -> Slots:
    """A copy of `slots` that nobody else can change, int64 [t]."""
    return np.array(slots, dtype=np.int64)


def _widest_word(row_bytes: int) -> torch.dtype:
    return next(word for word in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % word.itemsize == 0)


def _as_rows(array: NDArray[np.uint8]) -> _Rows:
    """uint8 [..., row] seen as [...] of opaque rows, which numpy copies with one memcpy each."""
    return array.view(f"V{array.shape[-1]}")[..., 0]
