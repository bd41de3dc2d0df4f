"""kill -9 and hangs of workers and gateways: answers stay whole, and nothing stays behind."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.pb.tandem.v1.generation_pb2 import RequestStats
from tests.e2e.cluster import PATIENCE, Cluster, eventually, running_cluster
from tests.e2e.failure_fixtures import (
    WORKER_OPTIONS,
    Answer,
    GrpcStream,
    Judge,
    RawHttp,
    announce,
    ask,
    completion_body,
    seize,
    sse_events,
    timed,
)
from tests.e2e.slow_model import slow_model
from tests.factories.http import NO_TLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = 1500
TIMES: dict[str, float] = {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, make_scratch: Callable[[], Path]) -> Iterator[Judge]:
    """Two prefill workers and one decode worker."""
    model = slow_model(tmp_path_factory.mktemp("slow-model"))
    # A prompt that one worker hangs on is taken to another soon.
    options = {"--prefill-timeout": "2"}
    with running_cluster(
        model.folder, make_scratch(), prefill=2, worker_options=WORKER_OPTIONS, decode_options=options
    ) as cluster:
        yield Judge(cluster, model)


@pytest.fixture
def judge(whole: Judge) -> Iterator[Judge]:
    """Every worker alive before the test, those that are left idle after it."""
    whole.cluster.restore()
    yield whole
    if not whole.cluster.members["decode-0"].alive:
        whole.cluster.restore()
    whole.recovered()


def prefilling(cluster: Cluster) -> str:
    """The prefill worker that computes a prompt at this moment, if any."""
    busy = (name for name in cluster.workers if name.startswith("prefill") and cluster.status(name).queued_tokens)
    return next(busy, "")


def seize_prefill(judge: Judge, prompt: list[int], max_tokens: int) -> tuple[GrpcStream, str]:
    """A request that is being prefilled by the worker that is returned with it."""
    cluster = judge.cluster
    found: list[str] = []

    def in_phase() -> bool:
        found[:] = [prefilling(cluster)]
        return bool(found[0])

    def passed() -> bool:
        decode = cluster.status("decode-0")
        return decode.running > 0 and decode.transfers == 0

    stream: GrpcStream = seize(lambda: GrpcStream(cluster, prompt, max_tokens), in_phase, passed)
    return stream, found[0]


def stats_of(answer: Answer) -> RequestStats:
    assert answer.stats is not None
    return answer.stats


# --- prefill workers ------------------------------------------------------------------------------------


def test_killed_prefill_worker_is_replaced_by_the_other(judge: Judge) -> None:
    prompt = judge.prompts.fresh(LONG)
    stream, victim = seize_prefill(judge, prompt, 12)
    with stream:
        judge.cluster.members[victim].kill()
        with timed("prefill killed, another alive: until first token", TIMES):
            stream.read(1)
        answer = stream.finish()
    assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 12)]
    assert stats_of(answer).prefill_worker != victim
    assert stats_of(answer).prefill_retries == 1
    judge.recovered()


def test_without_any_prefill_worker_decode_prefills_and_restarted_ones_are_used_again(judge: Judge) -> None:
    cluster = judge.cluster
    prompt = judge.prompts.fresh(LONG)
    stream, victim = seize_prefill(judge, prompt, 12)
    others = [name for name in cluster.workers if name.startswith("prefill") and name != victim]
    with stream:
        for name in (*others, victim):
            cluster.members[name].kill()
        with timed("all prefill killed: until first token", TIMES):
            stream.read(1)
        answer = stream.finish()
    assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 12)]
    assert stats_of(answer).prefill_worker == "decode-0"
    assert judge.normal_request() == "decode-0"
    # Both processes are gone, which decode can see for itself: none of their slots stays in quarantine.
    eventually(lambda: cluster.status("decode-0").staging.quarantined == 0, what="an empty quarantine")
    # Only this one, so that the router has no choice.
    with timed("prefill restarted: until paired", TIMES):
        cluster.members[victim].start()
        eventually(lambda: victim in cluster.status("decode-0").paired, what=f"{victim} paired")
    judge.uses(victim)
    staging = cluster.status("decode-0").staging
    assert staging.free + staging.granted + staging.quarantined == staging.total


def test_hung_prefill_worker_is_passed_over_and_harms_nobody_when_it_wakes(judge: Judge) -> None:
    cluster = judge.cluster
    prompt = judge.prompts.fresh(LONG)
    dropped = cluster.status("decode-0").dropped_messages
    stream, victim = seize_prefill(judge, prompt, 12)
    with stream, cluster.members[victim].frozen():
        with timed("prefill hung: until first token", TIMES):
            stream.read(1)
        answer = stream.finish()
        assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 12)]
        assert stats_of(answer).prefill_worker != victim
        cluster.wait_idle(workers=[name for name in cluster.workers if name != victim])
    with timed("prefill woken: until idle", TIMES):
        cluster.wait_idle()
    print("late messages dropped:", cluster.status("decode-0").dropped_messages - dropped)
    # If its pair had broken meanwhile it is made anew, and the slots come back with it.
    cluster.wait_ready()
    eventually(lambda: cluster.status("decode-0").staging.quarantined == 0, what="an empty quarantine")
    (other,) = (name for name in cluster.workers if name.startswith("prefill") and name != victim)
    with cluster.members[other].frozen():
        judge.uses(victim)


# --- decode workers -------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "two choices": {"n": 2, "temperature": 1.0, "seed": 8},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "min_tokens": 50},
    "logprobs": {"logprobs": 2},
}


@pytest.fixture
def spare(judge: Judge) -> Iterator[str]:
    """A second decode worker that runs and that nobody knows of, until it is announced."""
    cluster = judge.cluster
    cluster.add_worker("decode-1", redis="", prefill=cluster.members["prefill-0"].address)
    eventually(lambda: list(cluster.status("decode-1").paired) == ["prefill-0"], what="the spare's pair")
    yield "decode-1"
    member = cluster.members.pop("decode-1")
    if member.alive:
        member.kill()


def test_streams_of_a_killed_decode_worker_go_on_elsewhere_as_if_nothing_had_been(judge: Judge, spare: str) -> None:
    cluster = judge.cluster
    prompts = {name: judge.prompts.fresh(60) for name in VARIANTS}
    calm = {name: ask(cluster, prompts[name], 300, cache_salt="calm", **VARIANTS[name]) for name in VARIANTS}
    stop = _stop_string(calm["greedy"].choices[0].text)
    prompts["stop string"] = prompts["greedy"]
    calm["stop string"] = ask(cluster, prompts["greedy"], 300, cache_salt="calm", stop=[stop])
    assert stats_of(calm["stop string"]).decode_worker == "decode-0"
    variants = {**VARIANTS, "stop string": {"stop": [stop]}}
    with ExitStack() as stack:
        streams = {
            name: stack.enter_context(GrpcStream(cluster, prompts[name], 300, **options))
            for name, options in variants.items()
        }
        for stream in streams.values():
            stream.read(20)
        announce(cluster, spare)
        eventually(lambda: spare in {w["id"] for w in cluster.gateway_status()["workers"] if w["state"] == "ready"})
        before = {name: stream.answer.num_tokens for name, stream in streams.items()}
        assert cluster.status("decode-0").running == len(variants) + 1, "all were to be caught"
        cluster.members["decode-0"].kill()
        with timed("decode killed, another alive: until the next token", TIMES):
            streams["greedy"].read(before["greedy"] + 64)
        answers = {name: stream.finish() for name, stream in streams.items()}
    for name, answer in answers.items():
        assert stats_of(answer).decode_worker == spare, f"{name}: {answer.stats}"
        _assert_same(answer, calm[name], name)
    cluster.wait_idle()


def _stop_string(text: str) -> str:
    """Some characters from late in the text that do not occur earlier."""
    starts = range(len(text) * 2 // 3, len(text) - 4)
    pieces = ((start, text[start : start + 4]) for start in starts)
    return next(piece for start, piece in pieces if "\ufffd" not in piece and text.find(piece) == start)


def _assert_same(answer: Answer, calm: Answer, name: str) -> None:
    assert answer.token_ids == calm.token_ids, name
    assert (answer.prompt_tokens, answer.completion_tokens) == (calm.prompt_tokens, calm.completion_tokens), name
    for index, choice in calm.choices.items():
        assert answer.choices[index].text == choice.text, name
        assert answer.choices[index].finish_reason == choice.finish_reason, name
        assert answer.choices[index].logprobs == pytest.approx(choice.logprobs, abs=1e-4), name


def test_worker_that_comes_only_after_the_kill_takes_the_stream_over(judge: Judge, spare: str) -> None:
    cluster = judge.cluster
    prompt = judge.prompts.fresh(LONG)
    with GrpcStream(cluster, prompt, 60) as stream:
        stream.read(20)
        cluster.members["decode-0"].kill()
        announce(cluster, spare)
        answer = stream.finish()
    assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 60)]
    assert stats_of(answer).decode_worker == spare


def test_last_decode_worker_killed_ends_streams_in_an_error_and_frees_prefill(judge: Judge) -> None:
    """One stream that is decoding, one answer in one piece, and one prompt that is still being prefilled."""
    cluster = judge.cluster
    events = sse_events(cluster.url, completion_body(judge.prompts.fresh(100), 3000, stream=True))
    next(events)
    with ThreadPoolExecutor() as pool:
        body = completion_body(judge.prompts.fresh(100), 3000)
        whole = pool.submit(
            httpx.post, f"{cluster.url}/v1/completions", json=body, trust_env=False, verify=NO_TLS, timeout=PATIENCE
        )
        eventually(lambda: cluster.status("decode-0").running == 2, what="two requests")
        stream = GrpcStream(cluster, judge.prompts.fresh(3000), 10)
        eventually(lambda: prefilling(cluster), what="a prompt on its way")
        cluster.members["decode-0"].kill()
        with stream, timed("last decode killed: until all have their error", TIMES):
            _assert_service_error(list(events)[-1])
            answer = whole.result()
            assert answer.status_code == 503
            _assert_service_error(answer.json())
            assert stream.code() is grpc.StatusCode.UNAVAILABLE
    cluster.wait_idle()
    refused = httpx.post(f"{cluster.url}/v1/completions", json=body, trust_env=False, verify=NO_TLS, timeout=PATIENCE)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    with timed("decode restarted: until ready", TIMES):
        cluster.restore()
    judge.uses("prefill-0", "prefill-1")


def _assert_service_error(body: Any) -> None:
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "service_unavailable_error"
    assert "attempts" in body["error"]["message"] or "decode worker" in body["error"]["message"]


# --- gateways -------------------------------------------------------------------------------------------


def test_killed_gateway_leaves_nothing_behind(judge: Judge) -> None:
    """Its streams, its queue entries and its grants."""
    cluster = judge.cluster
    decoding = RawHttp(cluster, completion_body(judge.prompts.fresh(100), 3000, stream=True))
    decoding.read_until(b"data: ", 5)
    others = [RawHttp(cluster, completion_body(judge.prompts.fresh(3900), 50, stream=True)) for _ in range(6)]
    eventually(lambda: prefilling(cluster), what="a prompt on its way")
    eventually(lambda: cluster.gateway_status()["queue"]["waiting"] > 0, what="waiting requests")
    cluster.members["gateway"].kill()
    with timed("gateway killed: until workers are idle", TIMES):
        cluster.wait_idle()
    for request in (decoding, *others):
        request.hang_up()
    cluster.add_gateway("gateway-1")
    try:
        queue = eventually(lambda: _queue_without(cluster, "gateway-1"), what="the dead gateway's lease to lapse")
        assert queue["backend"] == "redis"
    finally:
        cluster.members.pop("gateway-1").kill()
    cluster.restore()


def _queue_without(cluster: Cluster, gateway: str) -> dict[str, Any] | None:
    """The queue's figures once nothing waits, nothing is granted and no other gateway holds a lease."""
    try:
        queue: dict[str, Any] = httpx.get(
            f"{cluster.url_of(gateway)}/tandem/status", trust_env=False, verify=NO_TLS
        ).json()["queue"]
    except httpx.HTTPError:
        return None
    return queue if queue["backend"] == "redis" and queue["waiting"] == queue["granted"] == 0 else None


# --- everything at once ---------------------------------------------------------------------------------


def test_sixteen_streams_with_random_disconnects_and_a_prefill_kill(judge: Judge) -> None:
    cluster, draw = judge.cluster, random.Random(16)
    jobs = [(judge.prompts.fresh(draw.randrange(40, 700)), draw.randrange(10, 60)) for _ in range(16)]
    leaves = {index: draw.randrange(1, jobs[index][1]) for index in draw.sample(range(16), 6)}

    def run(index: int) -> Answer:
        prompt, max_tokens = jobs[index]
        with GrpcStream(cluster, prompt, max_tokens, deadline=2 * PATIENCE) as stream:
            return stream.read(leaves[index]) if index in leaves else stream.finish()

    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(run, index) for index in range(16)]
        cluster.members[eventually(lambda: prefilling(cluster), what="a prefill")].kill()
        answers = [future.result() for future in running]
    for index, answer in enumerate(answers):
        prompt, max_tokens = jobs[index]
        expected = judge.model.oracle.greedy_cached(prompt, max_tokens)
        got = answer.token_ids[0]
        assert got == (expected[: len(got)] if index in leaves else expected), f"stream {index}"
    cluster.wait_idle()
