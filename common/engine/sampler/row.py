"""What the sampler must know of one row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        assert self.output_index == len(self.output_ids), f"{len(self.output_ids)} tokens, index {self.output_index}"
