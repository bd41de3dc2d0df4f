"""SIGTERM: what runs is finished, new work goes elsewhere or is refused with a time to come back, exit code 0."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest

from tests.e2e.cluster import PATIENCE, eventually, running_cluster
from tests.e2e.failure_fixtures import WORKER_OPTIONS, GrpcStream, Judge, completion_body, registered, timed
from tests.e2e.slow_model import slow_model
from tests.factories.http import NO_TLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMES: dict[str, float] = {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, make_scratch: Callable[[], Path]) -> Iterator[Judge]:
    model = slow_model(tmp_path_factory.mktemp("slow-model"))
    patient = {**WORKER_OPTIONS, "--drain-seconds": "60"}
    with running_cluster(model.folder, make_scratch(), worker_options=patient) as cluster:
        yield Judge(cluster, model)


@pytest.fixture
def judge(whole: Judge) -> Iterator[Judge]:
    """Every worker and the gateway alive before the test, those that are left idle after it."""
    whole.cluster.restore()
    yield whole
    if not (whole.cluster.members["decode-0"].alive and whole.cluster.members["gateway"].alive):
        whole.cluster.restore()
    whole.recovered()


def terminate(judge: Judge, name: str) -> None:
    process = judge.cluster.members[name].process
    assert process is not None
    process.send_signal(signal.SIGTERM)


def exit_code(judge: Judge, name: str) -> int:
    process = judge.cluster.members[name].process
    assert process is not None
    return process.wait(PATIENCE)


def state(judge: Judge, worker: str) -> str:
    return next(str(w["state"]) for w in judge.cluster.gateway_status()["workers"] if w["id"] == worker)


def test_drained_prefill_worker_finishes_its_prompt_and_takes_no_other(judge: Judge) -> None:
    cluster = judge.cluster
    prompt = judge.prompts.fresh(1500)
    with GrpcStream(cluster, prompt, 10) as stream:
        eventually(lambda: cluster.status("prefill-0").queued_tokens, what="a prompt being computed")
        terminate(judge, "prefill-0")
        answer = stream.finish()
    assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 10)]
    assert answer.stats is not None
    assert answer.stats.prefill_worker == "prefill-0"
    assert exit_code(judge, "prefill-0") == 0
    assert registered(cluster) == {"decode-0"}, "it leaves the registry"
    assert judge.normal_request() == "decode-0"


def test_drained_last_decode_worker_finishes_its_streams_while_new_requests_are_refused(judge: Judge) -> None:
    cluster = judge.cluster
    prompt = judge.prompts.fresh(100)
    with GrpcStream(cluster, prompt, 300) as stream:
        stream.read(5)
        terminate(judge, "decode-0")
        eventually(lambda: state(judge, "decode-0") == "draining", what="a draining worker")
        refused = httpx.post(
            f"{cluster.url}/v1/completions",
            json=completion_body(judge.prompts.fresh(10), 5),
            trust_env=False,
            verify=NO_TLS,
            timeout=PATIENCE,
        )
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        answer = stream.finish()
    assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 300)]
    with timed("decode drained: until it has left", TIMES):
        assert exit_code(judge, "decode-0") == 0


def test_drained_decode_worker_leaves_new_work_to_another(judge: Judge) -> None:
    cluster = judge.cluster
    prompt = judge.prompts.fresh(100)
    with GrpcStream(cluster, prompt, 1500) as stream:
        stream.read(5)
        cluster.add_worker("decode-1")
        eventually(lambda: "decode-1" in cluster.workers and _is_ready(judge, "decode-1"), what="decode-1")
        terminate(judge, "decode-0")
        eventually(lambda: state(judge, "decode-0") == "draining", what="a draining worker")
        accepted = cluster.status("decode-1").accepted_total
        judge.normal_request()
        assert cluster.status("decode-1").accepted_total == accepted + 1
        stream.cancel()
    assert exit_code(judge, "decode-0") == 0
    cluster.members.pop("decode-1").kill()


def _is_ready(judge: Judge, worker: str) -> bool:
    return any(w["id"] == worker and w["state"] == "ready" for w in judge.cluster.gateway_status()["workers"])


def test_decode_worker_out_of_drain_time_hands_its_streams_over(judge: Judge) -> None:
    cluster = judge.cluster
    cluster.add_worker("decode-1", drain_seconds="0")
    eventually(lambda: _is_ready(judge, "decode-1"), what="decode-1")
    prompts: list[list[int]] = []
    with ExitStack() as stack:
        streams: list[GrpcStream] = []
        # The router spreads them, sooner or later.
        while not cluster.status("decode-1").running:
            assert len(prompts) < 8, "nothing goes to decode-1"
            prompts.append(judge.prompts.fresh(40))
            streams.append(stack.enter_context(GrpcStream(cluster, prompts[-1], 200)))
            streams[-1].read(5)
        terminate(judge, "decode-1")
        answers = [stream.finish() for stream in streams]
    assert exit_code(judge, "decode-1") == 0
    cluster.members.pop("decode-1")
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 200)]
        assert answer.stats is not None
        assert answer.stats.decode_worker == "decode-0"


def test_drained_gateway_finishes_its_streams_and_refuses_new_ones(judge: Judge) -> None:
    cluster = judge.cluster
    prompt = judge.prompts.fresh(100)
    with GrpcStream(cluster, prompt, 300) as stream:
        stream.read(5)
        terminate(judge, "gateway")
        eventually(lambda: cluster.gateway_status()["gateway"]["state"] == "draining", what="a draining gateway")
        assert httpx.get(f"{cluster.url}/ready", trust_env=False, verify=NO_TLS).status_code == 503
        refused = httpx.post(
            f"{cluster.url}/v1/completions",
            json=completion_body([7, 8, 9], 5),
            trust_env=False,
            verify=NO_TLS,
            timeout=PATIENCE,
        )
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        with GrpcStream(cluster, [7, 8, 9], 5) as other:
            assert other.code() is grpc.StatusCode.UNAVAILABLE
        answer = stream.finish()
    assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 300)]
    with timed("gateway drained: until it has left", TIMES):
        assert exit_code(judge, "gateway") == 0
