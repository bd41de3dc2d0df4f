"""The sampler of both services: adjusts, draws, and reports log probabilities.

Sampling is a pure function of a row's (logits, parameters, seed, choice, output index, tokens so far), so a
request gets the same tokens alone or in a batch, from prefill or decode, and after a fail-over. It follows vLLM's
v1 sampler in what it does and in which order:

1. log probabilities are taken from the raw logits, before anything below;
2. `logit_bias` is added; end tokens (unless ignored, and there is no grammar that they end) and stop tokens are masked
   until `min_tokens` are out, unless the row's grammar allows nothing but such tokens: then it wins over `min_tokens`;
3. repetition penalty over prompt and output (positive logits divided, negative multiplied), then frequency and
   presence penalty over the output only; then all that the row's grammar does not allow is masked (stop tokens too);
4. greedy rows take the best token, the lowest id on ties;
5. the others: temperature, min_p, top_k, top_p, and one random number through the inverse CDF.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.sampler.adjust import adjusted
from common.engine.sampler.draw import draw
from common.engine.sampler.logprobs import token_logprobs
from common.engine.sampler.row import SampleRow
from common.sampling import SampledToken, SamplingParams

#: Below it a temperature cannot be told from 0, which is greedy.
_MIN_TEMPERATURE = 1e-5


class Sampler:
    """Stateless; one per model."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        assert all(0 <= eos < vocab_size for eos in eos_token_ids), f"{eos_token_ids} outside 0..{vocab_size - 1}"
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Choose a token for each of R rows.

        Args:
            logits: float32 [R, vocab], not changed. NaN, +inf or a row of only -inf is an assertion.
            rows: what to do with each row of them. A grammar's mask allows at least one token whose logit is finite.
        """
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} for {len(rows)} rows"
        assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
        if not rows:
            return []
        _assert_sane(logits, "raw")
        final = adjusted(logits, rows, self.eos_token_ids)
        if final is not logits:
            _assert_sane(final, "adjusted")
        token_ids = self._choose(final, rows)
        return [_sampled(logits[i], token_ids[i], row.params) for i, row in enumerate(rows)]

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        greedy = [i for i, row in enumerate(rows) if row.params.temperature < _MIN_TEMPERATURE]
        drawn = [i for i, row in enumerate(rows) if row.params.temperature >= _MIN_TEMPERATURE]
        token_ids = [-1] * len(rows)
        if greedy:
            for i, token_id in zip(greedy, _select(logits, greedy).argmax(dim=-1).tolist(), strict=True):
                token_ids[i] = token_id
        if drawn:
            for i, token_id in zip(drawn, draw(_select(logits, drawn), [rows[i] for i in drawn]), strict=True):
                token_ids[i] = token_id
        return token_ids


def _select(logits: Tensor, indices: Sequence[int]) -> Tensor:
    """Those rows, without a copy if they are all."""
    return logits if len(indices) == logits.shape[0] else logits[torch.tensor(indices, device=logits.device)]


def _sampled(logits: Tensor, token_id: int, params: SamplingParams) -> SampledToken:
    if params.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, token_logprobs(logits, token_id, params.logprobs))


def _assert_sane(logits: Tensor, which: str) -> None:
    """The maximum of a row is NaN if anything in it is."""
    sane = torch.isfinite(logits.amax(dim=-1))
    if not bool(sane.all()):
        rows = torch.nonzero(~sane)[:, 0].tolist()
        raise AssertionError(f"{which} logits of rows {rows} of {logits.shape[0]} have NaN, +inf or no finite value")
