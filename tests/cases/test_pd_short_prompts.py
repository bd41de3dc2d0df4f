"""PD-01: prompts of a block or two that are prefilled apart, wherever their prefix is cached."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from common.sampling import SamplingParams
from tests.cases.system import MONOLITH, System, joined
from tests.e2e.asking import submit
from tests.e2e.cluster import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BLOCK = 16


def pattern(length: int) -> list[int]:
    return ([57, 102, 280, 30] * length)[:length]


def test_pd_01_short_prompts_by_the_gateway(system: System) -> None:
    def run(length: int) -> None:
        def ask(gateway: str, **fields: Any) -> str:
            salt = f"pd-01 {gateway} {length} {fields}"
            return system.complete(pattern(length), max_tokens=8, gateway=gateway, cache_salt=salt, **fields).text

        expected = ask(MONOLITH)
        # Twice: with nothing cached, and with everything cached on both sides.
        for _ in range(2):
            assert ask("gateway") == ask("gateway", stream=True) == expected, length

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(1, 2 * BLOCK + 2)))


def test_pd_01_wherever_the_prefix_is_cached(system: System) -> None:
    """On one side only: a second decode worker has seen nothing that went through the first one."""
    cluster = system.cluster
    with joined(system, "decode-1", local_prefill_tokens="0"):
        eventually(lambda: "prefill-0" in cluster.status("decode-1").paired, what="the pair of decode-1")
        prefill = [cluster.members["prefill-0"].address]
        first, second = (cluster.members[name].address for name in ("decode-0", "decode-1"))
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1):
            prompt = pattern(length)
            alone = submit(first, prompt, params, salt=f"alone {length}")
            nowhere = submit(first, prompt, params, prefill=prefill, salt=f"a {length}")
            on_prefill = submit(second, prompt, params, prefill=prefill, salt=f"a {length}")
            on_both = submit(first, prompt, params, prefill=prefill, salt=f"a {length}")
            on_decode = submit(first, prompt, params, prefill=prefill, salt=f"alone {length}")
            assert not alone.was_transferred
            for answer in (nowhere, on_prefill, on_both, on_decode):
                assert answer.was_transferred
                assert answer.token_ids == alone.token_ids, length
            cached = (length - 1) // BLOCK * BLOCK
            assert (nowhere.cached_tokens, on_prefill.stats.decode_cached_tokens) == (0, 0)
            assert on_prefill.cached_tokens == on_both.stats.decode_cached_tokens == cached
            assert on_decode.stats.decode_cached_tokens == cached
