"""The demo model, for real and in fp32: the same tokens as transformers, whichever way prompt and KV take.

One system whose sides have blocks of different sizes, ways (who prefills) and prompts (lengths at the edges). Every
feature, other systems and conditions are in the parity matrix, with tiny models.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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

OUTPUT_TOKENS = 12
#: Of decode; prefill's are larger.
BLOCK_SIZE = 16
PREFILL_BLOCK_SIZE = 32
#: Small enough that the longest prompt takes three of them.
CHUNK_TOKENS = 64
#: KV of one token: K and V of 30 layers, 3 heads of 64, fp32.
KV_BYTES = 2 * 30 * 3 * 64 * 4

#: Prompt lengths in tokens.
PROMPTS: Mapping[str, int] = {
    "one token": 1,
    "a token less than 3 blocks": 3 * BLOCK_SIZE - 1,
    "3 blocks": 3 * BLOCK_SIZE,
    "a token more than 3 blocks": 3 * BLOCK_SIZE + 1,
    "longer than two chunks": 2 * CHUNK_TOKENS + 9,
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


@pytest.fixture(scope="module")
def system(demo_model: Path, make_scratch: Callable[[], Path]) -> Iterator[Cluster]:
    """A running system; nothing is prefilled on decode unless a test wants it."""
    workers = {
        "--transport": "ucx",
        "--block-size": str(BLOCK_SIZE),
        "--max-batch-tokens": str(CHUNK_TOKENS),
        "--kv-memory": "192MiB",
        "--slot-bytes": "64KiB",
        "--staging-memory": "8MiB",
    }
    with running_cluster(
        demo_model,
        make_scratch(),
        worker_options=workers,
        prefill_options={"--block-size": str(PREFILL_BLOCK_SIZE)},
        decode_options={"--local-prefill-tokens": "0"},
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
    assert (len(ids) - 1) // PREFILL_BLOCK_SIZE * PREFILL_BLOCK_SIZE <= warm.cached_tokens < len(ids)


def test_the_gateway_has_long_prompts_prefilled_apart(system: Cluster, text_ids: list[int]) -> None:
    length = max(PROMPTS.values())
    answer = by_gateway(system, text_ids[:length], "long")
    assert (answer.stats.prefill_worker, answer.stats.decode_worker) == ("prefill-0", "decode-0")
    assert answer.stats.transfer_bytes == length * KV_BYTES
    assert answer.stats.transfer_messages > 30


def test_batched_with_strangers(system: Cluster, reference: Mapping[str, list[int]], text_ids: list[int]) -> None:
    def stranger(number: int) -> Generated:
        prompt = text_ids[20 * number + 7 : 20 * number + 40]
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": number, "max_tokens": 16}
        return generate(system.grpc_target, prompt, n=1 + number % 2, cache_salt="strangers", **drawn)

    mine = [name for name, length in PROMPTS.items() if length < 100]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(stranger, number) for number in range(8 - len(mine))]
        answers = list(pool.map(lambda name: by_gateway(system, text_ids[: PROMPTS[name]], "among strangers"), mine))
        assert all(choice.token_ids for other in others for choice in other.result().choices)
    assert [answer.token_ids for answer in answers] == [reference[name] for name in mine]


#: Everything that a draw depends on.
SAMPLED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    min_p=0.01,
    seed=99,
    max_tokens=OUTPUT_TOKENS,
    min_tokens=8,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias={2: 20.0, 28: 3.0, 30: -100.0},
    logprobs=5,
)


def test_who_prefills_changes_no_draw(system: Cluster, text_ids: list[int]) -> None:
    prompt = text_ids[: 3 * BLOCK_SIZE + 1]
    apart = from_prefill(system, prompt, "apart", SAMPLED, n=3)
    here = on_decode(system, prompt, "here", SAMPLED, n=3)
    assert apart.all_token_ids == here.all_token_ids
    assert all(len(choice.token_ids) >= SAMPLED.min_tokens for choice in apart.choices)
    assert len({tuple(choice.token_ids) for choice in apart.choices}) == 3
    for one, other in zip(apart.choices, here.choices, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len(one.logprobs) == len(one.token_ids)


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
