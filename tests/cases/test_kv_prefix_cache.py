"""KV: a cached prefix changes nothing but the time, belongs to those who share a salt, and must fit the pool."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from common.sampling import SamplingParams
from deploy.valkey import valkey_url
from tests.cases.case_data import MODEL, Case, post, text_of, token_array
from tests.cases.replies import Reply
from tests.cases.streams import RawStream
from tests.cases.system import CONTROL, MONOLITH, System, joined
from tests.e2e.asking import Generated, submit
from tests.e2e.cluster import eventually, running_cluster
from tests.factories.served_model import WORKER_MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


# --- KV-01: hits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [17, 40, 200, 1500])
def test_kv_01_hit_and_miss_are_equal(system: System, length: int) -> None:
    prompt = token_array(length, seed=1000 + length)

    def ask(**fields: Any) -> Reply:
        return system.complete(prompt, max_tokens=24, logprobs=1, **fields)

    # Nobody has this salt: nothing is cached, and nothing is prefilled apart.
    reference = ask(gateway=MONOLITH, cache_salt=f"reference {length}")
    assert reference.cached_tokens == 0
    answers = [ask(cache_salt=f"kv-01 {length}") for _ in range(4)]
    assert answers[0].cached_tokens == 0
    assert all(answer.cached_tokens > 0 for answer in answers[1:])
    for answer in answers:
        assert_same(answer, reference)


def test_kv_01_shared_prefix(system: System) -> None:
    document = text_of(300)
    questions = ["\nWhat comes after three?", "\nWhat comes before two?"]
    fresh = [system.complete(document + q, max_tokens=24, logprobs=1, cache_salt=q) for q in questions]
    for number, question in enumerate((*questions, questions[0])):
        answer = system.complete(document + question, max_tokens=24, logprobs=1, cache_salt="kv-01 shared")
        assert (answer.cached_tokens > 250) == (number > 0)
        assert_same(answer, fresh[questions.index(question)])


def assert_same(answer: Reply, reference: Reply) -> None:
    assert answer.text == reference.text
    values, expected = ([value for _, value, _, _ in reply.logprobs] for reply in (answer, reference))
    assert values == pytest.approx(expected, abs=1e-2)


#: Beside the shared worker's, which is 512.
CHUNKS = (16, 64)


def test_kv_01_chunks_of_any_size(system: System) -> None:
    """A prefill worker for each limit of a chunk."""
    cluster, prompt = system.cluster, token_array(600, seed=7)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    decode = cluster.members["decode-0"].address

    def ask(salt: str, prefill: Sequence[str], length: int) -> Generated:
        return submit(decode, prompt[:length], params, prefill=prefill, salt=salt)

    reference = ask("reference", [], 600)
    with ExitStack() as stack:
        for limit in CHUNKS:
            stack.enter_context(joined(system, f"prefill-{limit}", max_batch_tokens=str(limit)))
        eventually(lambda: len(cluster.status("decode-0").paired) == 1 + len(CHUNKS), what="all pairs")
        for name in ("prefill-0", *(f"prefill-{limit}" for limit in CHUNKS)):
            address = [cluster.members[name].address]
            # Nothing cached, a part of the prompt cached on both sides, all of it.
            ask(name, address, 333)
            partly, wholly = (ask(name, address, 600) for _ in range(2))
            assert 0 < partly.cached_tokens < wholly.cached_tokens < 600
            for answer in (ask(f"{name} cold", address, 600), partly, wholly):
                assert answer.was_transferred
                assert answer.token_ids == reference.token_ids
                assert answer.choices[0].logprobs == pytest.approx(reference.choices[0].logprobs, abs=1e-2)


# --- KV-02: exact multiples of a block ----------------------------------------------------------------

BLOCK = 16
LENGTHS = [*range(1, 2 * BLOCK + 2), 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 8 * BLOCK]


def pattern(length: int) -> list[int]:
    """The case's array, in ids that the tiny model has."""
    return ([57, 102, 280, 30] * length)[:length]


def assert_cached(reply: Reply, length: int, at_least: int = 0) -> None:
    cached = reply.cached_tokens
    assert cached <= length - 1 and cached % BLOCK == 0, (length, cached)
    assert cached >= at_least, (length, cached)


@pytest.mark.parametrize("gateway", ["gateway", MONOLITH])
@pytest.mark.parametrize("max_tokens", [4, 1])
def test_kv_02_every_length_around_a_block(system: System, max_tokens: int, gateway: str) -> None:
    def run(length: int) -> None:
        def ask(num_tokens: int) -> Reply:
            settings = {"max_tokens": max_tokens, "ignore_eos": True, "cache_salt": f"{gateway} {max_tokens} {length}"}
            return system.complete(pattern(num_tokens), gateway=gateway, **settings)

        blocks_of_all_but_last = (length - 1) // BLOCK * BLOCK
        three = [ask(length) for _ in range(3)]
        assert_cached(three[0], length)
        for reply in three[1:]:
            assert_cached(reply, length, blocks_of_all_but_last)
        longer = ask(length + 1)
        assert_cached(longer, length + 1, length // BLOCK * BLOCK)
        again = ask(length)
        assert_cached(again, length, blocks_of_all_but_last)
        assert len({reply.text for reply in (*three, again)}) == 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, LENGTHS))


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK])
def test_kv_02_in_other_ways(system: System, length: int) -> None:
    def ask(**fields: Any) -> Reply:
        return system.complete(pattern(length), max_tokens=4, ignore_eos=True, cache_salt=f"ways {length}", **fields)

    plain = ask()
    for _ in range(2):
        both = ask(n=2)
        assert_cached(both, length)
        assert set(both.texts.values()) == {plain.text}
        scored = ask(echo=True, logprobs=1)
        assert scored.text.endswith(plain.text)
        assert len(scored.logprobs) == length + 4
    with ThreadPoolExecutor(2) as pool:
        salts = [f"at once {length}"] * 2
        twins = list(pool.map(lambda salt: system.complete(pattern(length), max_tokens=4, cache_salt=salt), salts))
    assert len({reply.text for reply in twins}) == 1


# --- KV-03: salts -------------------------------------------------------------------------------------


def test_kv_03_a_salt_keeps_hits_apart(system: System) -> None:
    prompt = token_array(8 * BLOCK, seed=33)
    order = ["tenant-a", "tenant-a", "tenant-b", None, None, "tenant-a"]
    a1, a2, b, n, n2, a3 = (system.complete(prompt, max_tokens=4, cache_salt=salt) for salt in order)
    assert [reply.cached_tokens for reply in (a1, b, n)] == [0, 0, 0]
    assert all(reply.cached_tokens > 0 for reply in (a2, n2, a3))
    assert len({reply.text for reply in (a1, a2, b, n, n2, a3)}) == 1


def test_kv_03_salts_that_could_collide(system: System) -> None:
    rest = " " + text_of(60)
    system.complete("c" + rest, max_tokens=1, cache_salt="ab")
    assert system.complete("bc" + rest, max_tokens=1, cache_salt="a").cached_tokens == 0
    assert system.complete("c" + rest, max_tokens=1, cache_salt="ab").cached_tokens > 0


@pytest.mark.parametrize("salt", ["", "x" * 2**20, 5, ["a"]], ids=["empty", "too long", "number", "list"])
def test_kv_03_salts_that_are_none(system: System, salt: object) -> None:
    reply = system.complete("hi", max_tokens=1, cache_salt=salt)
    assert reply.status == 400
    assert (reply.error["param"] or "").startswith("cache_salt")


def test_kv_03_null_is_no_salt(system: System) -> None:
    assert system.complete("hi", max_tokens=1, cache_salt=None).status == 200


def test_kv_03_the_salt_is_told_to_nobody(system: System) -> None:
    salt = "salt-that-must-not-be-seen"
    body = {"prompt": token_array(100, seed=35), "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with RawStream(system, post("/v1/completions", {**body, "cache_salt": salt})) as stream:
        stream.read_events(3)
        in_redis = redis_content(system)
        shown = [system.cluster.metrics(name) for name in system.cluster.members]
    shown.append(system.get("/tandem/status").text)
    logs = [member.log.read_text(encoding="utf-8") for member in system.cluster.members.values()]
    assert in_redis and all(shown)
    assert not any(salt in text for text in (*in_redis, *shown, *logs))


def redis_content(system: System) -> list[str]:
    """Every key and what it holds."""
    with Redis.from_url(valkey_url(system.cluster.scratch), decode_responses=True) as redis:
        read: Mapping[str, Callable[[str], object]] = {
            "string": redis.get,
            "hash": redis.hgetall,
            "zset": lambda key: redis.zrange(key, 0, -1),
            "set": redis.smembers,
            "list": lambda key: redis.lrange(key, 0, -1),
        }
        return [f"{key} {read[redis.type(key)](key)}" for key in redis.scan_iter()]


# --- KV-04: a pool that is smaller than the context ---------------------------------------------------


@pytest.fixture
def cramped(tiny_model: Path, scratch: Path) -> Iterator[System]:
    """Room for 512 tokens where the model could take 2048."""
    options = {**WORKER_MEMORY, "--num-blocks": "32", "--block-size": "16", "--max-model-len": "2048"}
    with running_cluster(tiny_model, scratch, worker_options=options) as cluster:
        yield System.fresh(cluster, context=512)


def test_kv_04_what_can_never_fit_is_refused(cramped: System, cases: Mapping[str, Case]) -> None:
    def preemptions() -> int:
        return sum(cramped.cluster.status(name).preemptions_total for name in cramped.cluster.workers)

    before = preemptions()
    for name, variant in cases["KV-04"].variants.items():
        reply = cramped.send(variant)
        if name == "just fits":
            assert reply.status == 200, reply
        else:
            # Documented: what cannot fit, output included, is refused at once.
            assert reply.status == 400, reply
            assert reply.error["code"] == "context_length_exceeded" and "fit" in reply.error["message"]
        cramped.assert_twin_agrees(reply, same_text=False)
        assert {control.text for control in cramped.send_all([CONTROL] * 10, at_once=10)} == {cramped.control_text}
    assert preemptions() <= before + 2
    models = cramped.get(f"/v1/models/{MODEL}").json()
    assert models["max_model_len"] == 512
    cramped.assert_alive()
