"""Every kernel in plain PyTorch: what the fast ones are tested against, and what runs where they cannot.

Works on any device and floating dtype; norms, rotations, softmax and silu accumulate in fp32. Nothing here is
tuned, and rows of a batch may differ in the last bits from the same rows computed alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.batch import Batch


class ReferenceLinear:
    """A weight kept as it is, multiplied by `torch.nn.functional.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


class ReferenceKernels:
    """`Kernels` without a compiler."""

    name = "reference"

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> ReferenceLinear:
        return ReferenceLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        cos_t, sin_t = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, D / 2]
        rotate_inplace(q, cos_t, sin_t)
        rotate_inplace(k, cos_t, sin_t)
        block, offset = slot_mapping // k_cache.shape[1], slot_mapping % k_cache.shape[1]
        k_cache[block, offset] = k
        v_cache[block, offset] = v

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float) -> Tensor:
        """Decodes go as one padded group; every longer chunk is a group of its own."""
        starts = batch.cu_seqlens_q[:-1].long()  # [S]
        lengths = batch.cu_seqlens_q.diff().tolist()
        decodes = [s for s, length in enumerate(lengths) if length == 1]
        groups = [decodes] if decodes else []
        groups += [[s] for s, length in enumerate(lengths) if length > 1]

        out = torch.empty_like(q)
        for group in groups:
            members = torch.tensor(group, device=q.device)
            offsets = torch.arange(lengths[group[0]], device=q.device)
            tokens = starts[members, None] + offsets  # [S', N], rows of q
            keys, values = (gather_pages(cache, batch, members) for cache in (k_cache, v_cache))
            out[tokens] = attend(q[tokens], keys, values, batch.positions[tokens], scale)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.float()).to(up.dtype) * up


def rotate_inplace(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the pairs (x[..., i], x[..., i + D / 2]) of x [T, heads, D] by the angles of cos, sin [T, 1, D / 2]."""
    x1, x2 = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))


def gather_pages(cache: Tensor, batch: Batch, members: Tensor) -> Tensor:
    """The pages of the sequences `members` [S'], in order of position: [S', L, G, D]; L = their longest context."""
    longest = int(batch.seq_lens[members].max())
    num_blocks = -(-longest // cache.shape[1])
    pages = cache[batch.block_tables[members, :num_blocks].long()]  # [S', num_blocks, B, G, D]
    return pages.flatten(1, 2)[:, :longest]


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """q [S, N, H, D] at `positions` [S, N] over keys, values [S, L, G, D]: [S, N, H, D]."""
    groups = q.float().reshape(*q.shape[:2], keys.shape[2], -1, q.shape[-1])  # [S, N, G, H / G, D]
    scores = torch.einsum("snghd,slgd->sghnl", groups, keys.float()) * scale
    hidden = torch.arange(keys.shape[1], device=q.device) > positions[..., None]  # [S, N, L]
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    # A page past a sequence's end may hold anything, NaN too, and 0 * NaN is NaN.
    visible = values.float().masked_fill(hidden.all(dim=1)[..., None, None], 0.0)
    out = torch.einsum("sghnl,slgd->snghd", scores.softmax(dim=-1), visible)
    return out.flatten(2, 3).to(q.dtype)
