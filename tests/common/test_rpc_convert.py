"""Values to messages and back."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pb.tandem.v1 import generation_pb2 as pb
from common.rpc.convert import (
    finish_from_proto,
    finish_to_proto,
    logprobs_to_proto,
    sampled_from_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from common.sampling import Candidate, FinishReason, SampledToken, SamplingParams, TokenLogprobs

uint32 = st.integers(0, 2**32 - 1)
doubles = st.floats(allow_nan=False)
float32 = st.floats(width=32, allow_nan=False)

sampling = st.builds(
    SamplingParams,
    temperature=doubles,
    top_p=doubles,
    top_k=uint32,
    min_p=doubles,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=uint32,
    min_tokens=uint32,
    stop_token_ids=st.lists(uint32, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | uint32,
    presence_penalty=doubles,
    frequency_penalty=doubles,
    repetition_penalty=doubles,
    logit_bias=st.dictionaries(uint32, float32, max_size=4),
)


@given(sampling)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    wire = sampling_to_proto(params).SerializeToString()
    assert sampling_from_proto(pb.SamplingParams.FromString(wire)) == params


def test_every_parameter_is_carried() -> None:
    """A field added to one of the two must be added to the other."""
    assert {f.name for f in fields(SamplingParams)} == {f.name for f in pb.SamplingParams.DESCRIPTOR.fields}


@given(uint32, float32, st.lists(st.tuples(uint32, float32), max_size=3))
def test_log_probabilities_survive_the_wire(token: int, logprob: float, top: list[tuple[int, float]]) -> None:
    logprobs = TokenLogprobs(Candidate(token, logprob), tuple(Candidate(*pair) for pair in top))
    wire = logprobs_to_proto(logprobs).SerializeToString()
    assert sampled_from_proto(token, pb.TokenLogprobs.FromString(wire)) == SampledToken(token, logprobs)
    assert sampled_from_proto(token, None) == SampledToken(token)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_survive_the_wire(reason: FinishReason | None) -> None:
    assert finish_from_proto(finish_to_proto(reason)) is reason
    expected = "UNSPECIFIED" if reason is None else reason.name
    assert pb.FinishReason.Name(finish_to_proto(reason)) == f"FINISH_REASON_{expected}"
