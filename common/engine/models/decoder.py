"""The one decoder behind all supported architectures: flat tokens in, logits of the wanted rows out.

Knows nothing of checkpoints (the loader builds it), of sampling or of scheduling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.engine.batch import Batch
from common.engine.kernels.interface import Kernels, PackedLinear
from common.engine.kv_cache import KVCache
from common.engine.layers.attention import Attention
from common.engine.layers.mlp import GatedMLP
from common.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block: norm, attention, norm, MLP, each pair added to the residual stream."""

    #: [hidden] each.
    input_norm: Tensor
    post_attention_norm: Tensor
    attention: Attention
    mlp: GatedMLP


class CausalLM:
    """A loaded model: weights and the forward pass. Holds no KV and no request."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embed: Callable[[Tensor], Tensor],
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: PackedLinear,
        kernels: Kernels,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`embed` makes hidden states [T, hidden], new ones each time, of token ids int64 [T]; `lm_head` maps hidden to
        vocab; `final_norm` fixes dtype and device."""
        self.config = config
        self.kernels = kernels
        self.eos_token_ids = eos_token_ids
        self.dtype = final_norm.dtype
        self.device = final_norm.device
        self._embed = embed
        self._layers = tuple(layers)
        #: The norm that follows each layer: the next one's input norm, at last the final one.
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), final_norm)
        self._lm_head = lm_head

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Compute the batch's tokens, writing their K and V into `kv_cache`.

        `on_layer(i)` is called in order as soon as layer i's K and V of all the batch's tokens have been written
        (on a GPU: enqueued); the rest of the layer still follows.

        Returns the normalised hidden states of the rows `batch.logits_indices`, then of `batch.scored_indices`:
        [R + N, hidden].
        """
        scored = batch.scored_indices
        eps = self.config.rms_norm_eps
        residual = self._embed(batch.token_ids)  # [T, hidden]
        x = self.kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            k_cache, v_cache = kv_cache.layer(index)
            q = layer.attention.store(x, batch, k_cache, v_cache)
            if on_layer is not None:
                on_layer(index)
            # In the last layer only rows whose logits are wanted matter from here on; where whole chunks are scored,
            # that is nearly all of them.
            if index == len(self._layers) - 1 and scored.shape[0] == 0:
                q, residual, batch = _keep_wanted_rows(q, residual, batch)
                if batch.num_tokens == 0:
                    return residual
            x = layer.attention.attend(q, batch, k_cache, v_cache)
            x, residual = self.kernels.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x, residual = self.kernels.add_rms_norm(layer.mlp(x), residual, next_norm, eps)
        return x if scored.shape[0] == 0 else x[torch.cat([batch.logits_indices, scored])]

    @torch.no_grad()  # not inference mode: samplers change logits in place
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows that `forward` returned -> fp32 [R, vocab], the caller's to change."""
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self._lm_head(hidden).float()


def _keep_wanted_rows(q: Tensor, residual: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Batch]:
    """q, residual and batch cut down to `batch.logits_indices`.

    Each wanted token becomes a sequence of its own with one query token, whose context ends at it: right because
    its K and V, and those of all before it, are in the pages already.
    """
    rows = batch.logits_indices
    if rows.shape[0] == batch.num_tokens:
        return q, residual, batch
    positions = batch.positions[rows]
    sequences = torch.searchsorted(batch.cu_seqlens_q[1:], rows, right=True)
    wanted = replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=positions,
        slot_mapping=batch.slot_mapping[rows],
        block_tables=batch.block_tables[sequences],
        cu_seqlens_q=torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device),
        seq_lens=(positions + 1).to(torch.int32),
        logits_indices=torch.arange(rows.shape[0], device=rows.device),
        max_query_len=1,
    )
    return q[rows], residual[rows], wanted
