"""Requests for tests of the decode engine."""

from typing import Any

from common.sampling import SamplingParams
from decode_svc.request import ChoicePrefix, DecodeRequest, PrefillTarget
from tests.decode_svc.harness import DecodeHarness, Remote
from tests.factories.engines import VOCAB

P1, P2 = PrefillTarget("p1", "p1:1"), PrefillTarget("p2", "p2:1")


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 7 + i * 5) % (VOCAB - 2) + 2 for i in range(length))


def request(name: str = "r", length: int = 10, n: int = 1, **fields: Any) -> DecodeRequest:
    values: dict[str, Any] = {
        "stream": "s",
        "attempt": 0,
        "prompt_ids": prompt(length),
        "choices": (ChoicePrefix(),) * n,
        "params": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    }
    return DecodeRequest(request_id=name, **(values | fields))


def remote_number(harness: DecodeHarness, number: int) -> Remote:
    """The prompt that prefill workers were asked for as the `number`-th, from 0."""
    return list(harness.remotes.values())[number]
