"""What the sampler must know of one row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One position to sample; `output_index` is that of the token to come.

    The token sequences are read only if the parameters have penalties. They may be lists; arrays (`array`,
    numpy) are read without a copy, which pays for long prompts.
    """

    params: SamplingParams
    choice: int
    output_index: int
    prompt_ids: Sequence[int]
    #: All output so far.
    output_ids: Sequence[int]
    #: What the request's grammar allows here, int32 [ceil(vocab / 32)], token i in bit i % 32 of word i // 32; bits
    #: beyond the vocabulary are ignored. None: any token.
    allowed: NDArray[np.int32] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert self.output_index == len(self.output_ids), f"{len(self.output_ids)} tokens, index {self.output_index}"
