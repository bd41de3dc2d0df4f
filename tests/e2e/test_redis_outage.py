"""Losing Redis stops no stream and refuses nobody; when it is back, empty, all is as before."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import eventually, running_cluster
from tests.e2e.failure_fixtures import WORKER_OPTIONS, GrpcStream, Judge, registered, timed
from tests.e2e.slow_model import slow_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMES: dict[str, float] = {}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, make_scratch: Callable[[], Path]) -> Iterator[Judge]:
    model = slow_model(tmp_path_factory.mktemp("slow-model"))
    with running_cluster(model.folder, make_scratch(), worker_options=WORKER_OPTIONS) as cluster:
        yield Judge(cluster, model)


def backend(judge: Judge) -> str:
    return str(judge.cluster.gateway_status()["queue"]["backend"])


def test_streams_and_new_requests_go_on_without_redis_and_all_is_normal_after_it_is_back(judge: Judge) -> None:
    cluster = judge.cluster
    eventually(lambda: backend(judge) == "redis", what="the queue in Redis")
    prompt = judge.prompts.fresh(300)
    with GrpcStream(cluster, prompt, 400) as stream:
        stream.read(10)
        cluster.kill_valkey()
        with timed("Valkey killed: until a new request is served", TIMES):
            judge.normal_request()
        assert backend(judge) == "local"
        assert stream.answer.num_tokens < 400, "the stream was over before Valkey was killed"
        answer = stream.finish()
    assert answer.token_ids == [judge.model.oracle.greedy_cached(prompt, 400)]
    states = {worker["id"]: worker["state"] for worker in cluster.gateway_status()["workers"]}
    assert states == {"prefill-0": "ready", "decode-0": "ready"}, "an emptied registry evicts nobody"
    cluster.start_valkey()
    with timed("Valkey restarted: until the queue is there again", TIMES):
        eventually(lambda: backend(judge) == "redis", what="the queue in Redis")
    with timed("Valkey restarted: until workers are announced", TIMES):
        eventually(lambda: registered(cluster) == {"prefill-0", "decode-0"}, what="both workers in the registry")
    judge.recovered()
    eventually(lambda: cluster.gateway_status()["queue"]["granted"] == 0, what="no grants")


def test_worker_restarted_while_redis_is_away_is_found_again_by_its_address(judge: Judge) -> None:
    cluster = judge.cluster
    cluster.kill_valkey()
    cluster.members["prefill-0"].kill()
    assert judge.normal_request() == "decode-0"
    cluster.restore()
    judge.uses("prefill-0")
    cluster.start_valkey()
    eventually(lambda: registered(cluster) == {"prefill-0", "decode-0"}, what="both workers in the registry")
    eventually(lambda: backend(judge) == "redis", what="the queue in Redis")
    judge.recovered()


def test_hung_redis_delays_nobody_for_long(judge: Judge) -> None:
    cluster = judge.cluster
    with cluster.frozen_valkey():
        with timed("Valkey hung: until a new request is served", TIMES):
            judge.normal_request()
        eventually(lambda: backend(judge) == "local", what="the local queue")
        judge.normal_request()
    eventually(lambda: backend(judge) == "redis", what="the queue in Redis")
    judge.recovered()
