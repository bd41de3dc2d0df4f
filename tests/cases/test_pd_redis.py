"""PD-07: Redis comes and goes, and requests end all the same."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from redis import Redis

from deploy.valkey import valkey_url
from tests.cases.case_data import post, token_array
from tests.cases.streams import RawStream, json_events
from tests.cases.system import CONTROL, System
from tests.e2e.cluster import eventually
from tests.e2e.failure_fixtures import registered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def backend(system: System) -> str:
    return str(system.cluster.gateway_status()["queue"]["backend"])


@contextmanager
def killed(system: System) -> Iterator[None]:
    system.cluster.kill_valkey()
    yield
    system.cluster.start_valkey()


@contextmanager
def frozen(system: System) -> Iterator[None]:
    """Connections stay half open: nobody answers, and nobody says so."""
    with system.cluster.frozen_valkey():
        yield


@contextmanager
def flushed(system: System) -> Iterator[None]:
    with Redis.from_url(valkey_url(system.cluster.scratch)) as redis:
        redis.flushall()
    yield


@pytest.mark.parametrize("fault", [killed, frozen, flushed])
def test_pd_07_redis_comes_and_goes(slow_system: System, fault: Callable[[System], Any]) -> None:
    system = slow_system
    eventually(lambda: backend(system) == "redis", what="the queue in Redis")
    # Nothing is cached from the fault before: all prompts are under way when this one comes.
    drawn = {"temperature": 0, "cache_salt": fault.__name__}
    long = {**drawn, "max_tokens": 150, "ignore_eos": True, "stream": True}
    streaming = [post("/v1/completions", {"prompt": token_array(50, seed=n), **long}) for n in range(3)]
    waiting = [
        post("/v1/completions", {"prompt": token_array(900, seed=100 + n), "max_tokens": 4, **drawn}) for n in range(5)
    ]
    begun = system.requests_begun()
    with ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        streams = [stack.enter_context(RawStream(system, variant)) for variant in streaming]
        for stream in streams:
            stream.read_events(2)
        queued = [pool.submit(system.send, variant) for variant in waiting]
        eventually(lambda: system.requests_begun() == begun + 8, what="five more requests")
        with fault(system):
            # Not a hang while Redis is away: the gateway admits by itself.
            assert system.send(CONTROL).text == system.control_text
            answers = [future.result() for future in queued]
            ended = [stream.read_to_end() for stream in streams]
    assert all(reply.status == 200 for reply in answers)
    assert all(len(json_events(reply.raw)) > 100 and reply.finish_reason == "length" for reply in ended)
    eventually(lambda: backend(system) == "redis", what="the queue in Redis again")
    for _ in range(20):
        assert system.send(CONTROL).text == system.control_text
    eventually(lambda: registered(system.cluster) == {"prefill-0", "decode-0"}, what="both workers announced again")
    system.assert_alive()


def test_pd_07_worker_killed_with_a_request_it_just_took(slow_system: System) -> None:
    """No worker pops jobs: what it has accepted is the gateway's to hand to the next one."""
    system = slow_system
    cluster = system.cluster
    body = {"prompt": token_array(2000, seed=77), "max_tokens": 4, "temperature": 0}
    right = system.send(post("/v1/completions", body)).text
    accepted = cluster.status("decode-0").accepted_total
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(system.send, post("/v1/completions", {**body, "cache_salt": "again"}))
        eventually(lambda: cluster.status("decode-0").accepted_total > accepted, what="the request being accepted")
        cluster.members["decode-0"].kill()
        cluster.members["decode-0"].start()
        reply = asked.result()
    assert reply.status == 503 or reply.text == right, reply
