"""Sixteen streams at once, of all kinds: each says what it says alone, and nothing is left behind."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.asking import Generated, generate
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS = 16
#: Taken in turn: greedy, sampled, several choices, penalties.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    {"temperature": 0.7, "seed": 6, "n": 3, "top_k": 40},
    {"temperature": 1.0, "seed": 7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]
#: Prompt lengths in tokens, taken in turn: below and above the limit of local prefill, at the edges of blocks.
LENGTHS = [3, 31, 64, 65, 200, 500]


def ask(served: Cluster, number: int, round_: str) -> Generated:
    """Stream `number`; streams of different rounds share no cache."""
    prompt = [random.Random(number).randrange(3, 370) for _ in range(LENGTHS[number % len(LENGTHS)])]
    options = KINDS[number % len(KINDS)]
    return generate(served.grpc_target, prompt, max_tokens=32 + number, cache_salt=round_, **options)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_each_equals_its_solo_run(served: Cluster, warm: bool) -> None:
    solo = [ask(served, number, f"solo {warm}") for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        together = list(
            pool.map(lambda number: ask(served, number, f"solo {warm}" if warm else "together"), range(STREAMS))
        )
    for number, (alone, among_others) in enumerate(zip(solo, together, strict=True)):
        assert among_others.all_token_ids == alone.all_token_ids, f"stream {number}"
        assert {len(choice.token_ids) for choice in among_others.choices} == {32 + number}
    assert any(answer.was_transferred for answer in (solo if warm else together))
    assert all(answer.cached_tokens > 0 for answer in together if warm and answer.stats.prompt_tokens > 16)
    served.wait_idle()
