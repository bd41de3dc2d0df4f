"""The demo model, for real and in fp32: the same tokens as transformers, whichever way prompt and KV take.

A matrix of systems (how the two sides are set up), ways (who prefills) and prompts (lengths at the edges).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.sampling import SamplingParams
from tests.e2e.asking import Generated, generate, submit
from tests.e2e.cluster import PATIENCE, Cluster, running_cluster
from tests.factories.oracle import Oracle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OUTPUT_TOKENS = 24
BLOCK_SIZE = 16
COARSEST_BLOCK = 32
#: Small enough that the longest prompt takes three of them.
CHUNK_TOKENS = 256
#: KV of one token: K and V of 30 layers, 3 heads of 64, fp32.
KV_BYTES = 2 * 30 * 3 * 64 * 4

#: Prompt lengths in tokens.
PROMPTS: Mapping[str, int] = {
    "one token": 1,
    "a token less than 4 blocks": 4 * BLOCK_SIZE - 1,
    "4 blocks": 4 * BLOCK_SIZE,
    "a token more than 4 blocks": 4 * BLOCK_SIZE + 1,
    "longer than two chunks": 700,
}


@dataclass(frozen=True)
class System:
    """How prefill and decode differ from the defaults."""

    transport: str
    prefill: Mapping[str, str] = field(default_factory=dict)
    decode: Mapping[str, str] = field(default_factory=dict)


SYSTEMS: Mapping[str, System] = {
    "ucx": System("ucx"),
    "larger blocks on prefill": System("ucx", prefill={"--block-size": str(COARSEST_BLOCK)}),
    "smaller blocks on prefill, over gRPC": System("grpc", prefill={"--block-size": "8"}),
}

TEXT = (
    "The river rises in the hills above the town, and for most of the year it is no more than a stream. "
    "In spring, when the snow melts, it fills its bed and carries branches, and once a whole shed, to the mill. "
    "People here still measure the years by its floods: {} was the year when the bridge went. "
)


@pytest.fixture(scope="module")
def text_ids(demo_model: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode("".join(TEXT.format(1900 + i) for i in range(12))).ids
    assert len(ids) >= max(PROMPTS.values())
    return ids


@pytest.fixture(scope="module")
def reference(demo_model: Path, text_ids: list[int]) -> Mapping[str, list[int]]:
    """What transformers says to each prompt."""
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval())
    return {name: oracle.greedy_cached(text_ids[:length], OUTPUT_TOKENS) for name, length in PROMPTS.items()}


@pytest.fixture(scope="module", params=list(SYSTEMS))
def system(request: pytest.FixtureRequest, demo_model: Path, make_scratch: Callable[[], Path]) -> Iterator[Cluster]:
    """A running system; nothing is prefilled on decode unless a test wants it."""
    setup = SYSTEMS[request.param]
    workers = {
        "--transport": setup.transport,
        "--block-size": str(BLOCK_SIZE),
        "--max-batch-tokens": str(CHUNK_TOKENS),
        "--kv-memory": "192MiB",
        "--slot-bytes": "256KiB",
        "--staging-memory": "8MiB",
    }
    with running_cluster(
        demo_model,
        make_scratch(),
        worker_options=workers,
        prefill_options=setup.prefill,
        decode_options={"--local-prefill-tokens": "0", **setup.decode},
        gateway_options={"--local-prefill-tokens": "0"},
    ) as cluster:
        yield cluster
        cluster.wait_idle()


Ask = Callable[[Cluster, Sequence[int], str], Generated]

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


def from_prefill(
    cluster: Cluster, prompt: Sequence[int], salt: str, params: SamplingParams = GREEDY, n: int = 1
) -> Generated:
    """Told to have it prefilled apart, however short it is."""
    decode, prefill = cluster.members["decode-0"].address, cluster.members["prefill-0"].address
    answer = submit(decode, prompt, params, prefill=[prefill], n=n, salt=salt)
    assert answer.was_transferred
    # What decode already held was not sent again.
    missing = len(prompt) - answer.stats.decode_cached_tokens
    assert answer.stats.transfer_bytes == missing * KV_BYTES
    return answer


def on_decode(
    cluster: Cluster, prompt: Sequence[int], salt: str, params: SamplingParams = GREEDY, n: int = 1
) -> Generated:
    """Told to prefill it where it is decoded."""
    answer = submit(cluster.members["decode-0"].address, prompt, params, n=n, salt=salt)
    assert not answer.was_transferred
    return answer


def by_gateway(cluster: Cluster, prompt: Sequence[int], salt: str) -> Generated:
    """As the router likes."""
    return generate(cluster.grpc_target, prompt, cache_salt=salt, temperature=0.0, max_tokens=OUTPUT_TOKENS)


WAYS: Mapping[str, Ask] = {"from prefill": from_prefill, "on decode": on_decode, "by gateway": by_gateway}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens(
    system: Cluster, reference: Mapping[str, list[int]], text_ids: list[int], prompt: str, way: str
) -> None:
    ids = text_ids[: PROMPTS[prompt]]
    # Of its own, so that nothing is found in a cache; then again, with all of it there.
    salt = f"{way} {prompt}"
    cold, warm = (WAYS[way](system, ids, salt) for _ in range(2))
    assert cold.token_ids == reference[prompt]
    assert cold.cached_tokens == 0
    assert warm.token_ids == reference[prompt]
    # Whole blocks of the side that computes; the last token is computed in any case.
    assert warm.stats.decode_cached_tokens == (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert (len(ids) - 1) // COARSEST_BLOCK * COARSEST_BLOCK <= warm.cached_tokens < len(ids)


def test_the_gateway_has_long_prompts_prefilled_apart(system: Cluster, text_ids: list[int]) -> None:
    answer = by_gateway(system, text_ids[:700], "long")
    assert (answer.stats.prefill_worker, answer.stats.decode_worker) == ("prefill-0", "decode-0")
    assert answer.stats.transfer_bytes == 700 * KV_BYTES
    assert answer.stats.transfer_messages > 30


def test_batched_with_strangers(system: Cluster, reference: Mapping[str, list[int]], text_ids: list[int]) -> None:
    def stranger(number: int) -> Generated:
        prompt = text_ids[50 * number + 7 : 50 * number + 60]
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": number, "max_tokens": 40}
        return generate(system.grpc_target, prompt, n=1 + number % 2, cache_salt="strangers", **drawn)

    mine = [name for name, length in PROMPTS.items() if length < 100]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(stranger, number) for number in range(8 - len(mine))]
        answers = list(pool.map(lambda name: by_gateway(system, text_ids[: PROMPTS[name]], "among strangers"), mine))
        assert all(choice.token_ids for other in others for choice in other.result().choices)
    assert [answer.token_ids for answer in answers] == [reference[name] for name in mine]


#: What is drawn must not depend on who computed the first token. Each with its number of choices.
SAMPLED: Mapping[str, tuple[SamplingParams, int]] = {
    "seeded": (SamplingParams(temperature=0.8, seed=1234, max_tokens=24, ignore_eos=True), 1),
    "filters": (SamplingParams(temperature=1.2, top_p=0.9, top_k=50, min_p=0.02, seed=5, max_tokens=24), 2),
    "logprobs": (SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5), 1),
    "penalties, bias and a least length": (
        SamplingParams(
            temperature=0.9,
            seed=99,
            max_tokens=20,
            min_tokens=12,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            repetition_penalty=1.3,
            logit_bias={2: 20.0, 28: 3.0, 30: -100.0},
        ),
        3,
    ),
}


@pytest.mark.parametrize("case", SAMPLED)
def test_who_prefills_changes_no_draw(system: Cluster, text_ids: list[int], case: str) -> None:
    params, n = SAMPLED[case]
    prompt = text_ids[:65]
    apart = from_prefill(system, prompt, f"{case} apart", params, n)
    here = on_decode(system, prompt, f"{case} here", params, n)
    assert apart.all_token_ids == here.all_token_ids
    assert all(len(choice.token_ids) >= max(1, params.min_tokens) for choice in apart.choices)
    assert n == 1 or len({tuple(choice.token_ids) for choice in apart.choices}) == n
    for one, other in zip(apart.choices, here.choices, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len(one.logprobs) == (0 if params.logprobs is None else len(one.token_ids))


def test_completion_of_one_token_id(
    system: Cluster, demo_model: Path, reference: Mapping[str, list[int]], text_ids: list[int]
) -> None:
    with OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        answer = client.completions.create(
            model="test-model",
            prompt=text_ids[:1],
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            extra_body={"ignore_eos": True},
        )
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert answer.choices[0].text == tokenizer.decode(reference["one token"])
