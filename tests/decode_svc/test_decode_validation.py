"""What is refused at once, by field."""

import math
from typing import Any

import pytest

from common.errors import ContextTooLong, InvalidRequest
from common.sampling import GrammarKind, GrammarSpec, SamplingParams
from decode_svc.request import ChoicePrefix, DecodeRequest
from decode_svc.validation import RequestLimits, check_request

LIMITS = RequestLimits(max_request_tokens=20, vocab_size=10)


def request(**changes: Any) -> DecodeRequest:
    values: dict[str, Any] = {"prompt_ids": (1, 2, 3), "choices": (ChoicePrefix(),), "params": SamplingParams()}
    return DecodeRequest("s", "r", 0, **(values | changes))


def params(**changes: Any) -> DecodeRequest:
    return request(params=SamplingParams(**changes))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request(prompt_ids=()), "prompt_ids"),
        (request(prompt_ids=(1, 10)), "prompt_ids"),
        (request(prompt_ids=(1,) * 20), "prompt_ids"),
        (request(choices=()), "choices"),
        (request(choices=(ChoicePrefix(),) * 129), "choices"),
        (request(choices=(ChoicePrefix((1,), finished=True),)), "choices"),
        (request(choices=(ChoicePrefix((1,) * 16),)), "choices"),
        (request(choices=(ChoicePrefix((10,)),)), "choices"),
        (request(prompt_ids=(1,) * 19, choices=(ChoicePrefix((1,)),)), "choices"),
        (params(temperature=-0.1), "temperature"),
        (params(temperature=math.nan), "temperature"),
        (params(temperature=math.inf), "temperature"),
        (params(top_p=0.0), "top_p"),
        (params(top_p=1.1), "top_p"),
        (params(top_p=math.nan), "top_p"),
        (params(min_p=-0.1), "min_p"),
        (params(min_p=1.1), "min_p"),
        (params(repetition_penalty=0.0), "repetition_penalty"),
        (params(repetition_penalty=1e-45), "repetition_penalty"),
        (params(repetition_penalty=math.inf), "repetition_penalty"),
        (params(presence_penalty=math.nan), "presence_penalty"),
        (params(presence_penalty=-1e39), "presence_penalty"),
        (params(frequency_penalty=math.inf), "frequency_penalty"),
        (params(logit_bias={10: 1.0}), "logit_bias"),
        (params(logit_bias={1: math.inf}), "logit_bias"),
        (params(logit_bias={1: math.nan}), "logit_bias"),
        (params(stop_token_ids=(10,)), "stop_token_ids"),
        (params(stop_token_ids=tuple(range(9)), min_tokens=1), "stop_token_ids"),
        (params(max_tokens=0), "max_tokens"),
        (params(min_tokens=17), "min_tokens"),
        (params(logprobs=101), "logprobs"),
        (params(prompt_logprobs=11), "prompt_logprobs"),
        (params(grammar=GrammarSpec(GrammarKind.EBNF, "any")), "grammar"),
        (request(timeout=math.nan), "timeout_seconds"),
        (request(timeout=math.inf), "timeout_seconds"),
    ],
)
def test_a_bad_field_is_named(bad: DecodeRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(bad, LIMITS)
    assert caught.value.field == field
    assert caught.value.message


@pytest.mark.parametrize(
    "good",
    [
        request(),
        request(prompt_ids=(9,) * 19),
        request(choices=(ChoicePrefix((9,) * 15), ChoicePrefix((1,) * 16, finished=True))),
        request(timeout=0.001),
        request(timeout=-1.0),
        params(temperature=0.0, top_p=1.0, min_p=1.0, logit_bias={9: -100.0}, stop_token_ids=(9,), logprobs=0),
        params(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.01, min_tokens=16),
    ],
)
def test_the_edges_of_what_is_possible_are_taken(good: DecodeRequest) -> None:
    check_request(good, LIMITS)


def test_a_prompt_that_is_too_long_says_how_much_fits() -> None:
    with pytest.raises(ContextTooLong, match="20 tokens of prompt and answer"):
        check_request(request(prompt_ids=(1,) * 25), LIMITS)
