"""The sampler against transformers' own `generate`: step by step the same tokens left, with the same probabilities.

`generate` says for each step what logits the model gave and what its processors and warpers made of them. The sampler
is given the former and must come to the latter. What the two define differently is not compared: penalties that count
(transformers has none), and top_p together with min_p (transformers cuts by min_p last).
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from common.engine.sampler import SampleRow
from common.engine.sampler.adjust import adjusted
from common.engine.sampler.draw import filtered_probabilities
from common.sampling import SamplingParams
from tests.factories.models import EOS_TOKEN_ID, write_tiny_model

STEPS = 12
PROMPT = [7, 19, 23, 7, 101, 250, 19, 44]

#: Name -> the same settings for `generate` and for the sampler.
SETTINGS: Mapping[str, tuple[Mapping[str, Any], SamplingParams]] = {
    "temperature": ({"temperature": 0.6}, SamplingParams(temperature=0.6)),
    "high temperature": ({"temperature": 1.9}, SamplingParams(temperature=1.9)),
    "top_k": ({"top_k": 7}, SamplingParams(top_k=7)),
    "top_k of one": ({"top_k": 1}, SamplingParams(top_k=1)),
    "top_p": ({"top_p": 0.35}, SamplingParams(top_p=0.35)),
    "top_p that keeps one": ({"top_p": 0.001}, SamplingParams(top_p=0.001)),
    "min_p": ({"min_p": 0.4}, SamplingParams(min_p=0.4)),
    "all but min_p": (
        {"temperature": 0.8, "top_k": 40, "top_p": 0.7},
        SamplingParams(temperature=0.8, top_k=40, top_p=0.7),
    ),
    "temperature, top_k and min_p": (
        {"temperature": 1.3, "top_k": 60, "min_p": 0.3},
        SamplingParams(temperature=1.3, top_k=60, min_p=0.3),
    ),
    "repetition penalty": ({"repetition_penalty": 1.7}, SamplingParams(repetition_penalty=1.7)),
    "repetition reward": ({"repetition_penalty": 0.6}, SamplingParams(repetition_penalty=0.6)),
    "bias": (
        {"sequence_bias": [[[12], 4.0], [[13], -4.0], [[EOS_TOKEN_ID], 3.0]]},
        SamplingParams(logit_bias={12: 4.0, 13: -4.0, EOS_TOKEN_ID: 3.0}),
    ),
    "min_tokens": (
        {"min_new_tokens": STEPS, "sequence_bias": [[[EOS_TOKEN_ID], 50.0]]},
        SamplingParams(min_tokens=STEPS, logit_bias={EOS_TOKEN_ID: 50.0}),
    ),
    "all at once": (
        {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.3, "min_new_tokens": 4},
        SamplingParams(temperature=0.9, top_k=50, top_p=0.8, repetition_penalty=1.3, min_tokens=4),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama2")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_distribution_as_generate(model: PreTrainedModel, setting: str, seed: int) -> None:
    theirs, ours = SETTINGS[setting]
    torch.manual_seed(seed)
    # transformers filters by top_k = 50 unless told otherwise.
    config = {"do_sample": True, "max_new_tokens": STEPS, "top_k": 0, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}
    output = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        generation_config=GenerationConfig(**{**config, **theirs}),
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    drawn = output.sequences[0, len(PROMPT) :].tolist()
    for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        row = SampleRow(ours, 0, step, PROMPT, drawn[:step])
        probabilities = filtered_probabilities(adjusted(logits.float(), [row], [EOS_TOKEN_ID]), [ours])[0]
        probabilities /= probabilities.sum()
        expected = torch.softmax(scores[0].double(), dim=-1)
        assert (probabilities > 0).tolist() == (expected > 0).tolist(), f"step {step}"
        torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-7)
