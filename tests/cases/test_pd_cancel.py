"""PD-03: clients that leave in any phase give back all that was held for them, on both sides."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from tests.cases.case_data import post, token_array
from tests.cases.streams import RawStream
from tests.cases.system import CONTROL, System
from tests.e2e.cluster import eventually, running_cluster
from tests.e2e.failure_fixtures import WORKER_OPTIONS, GrpcStream
from tests.e2e.slow_model import MAX_LENGTH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Little staging, so that KV is still on its way when the prompt is computed.
SLOW_LINK = {"--staging-memory": "16KiB", "--slot-bytes": "8KiB"}
STORM = 60


@pytest.fixture
def slow_link(slow_folder: Path, scratch: Path) -> Iterator[System]:
    with running_cluster(slow_folder, scratch, worker_options={**WORKER_OPTIONS, **SLOW_LINK}) as cluster:
        yield System.fresh(cluster, context=MAX_LENGTH)


def test_pd_03_cancelled_in_any_phase(slow_link: System) -> None:
    """Fewer than in the case; each is left at a moment of its own, and then many at the same one."""
    system, draw = slow_link, random.Random(3)
    slots = system.cluster.status("decode-0").staging
    delays = [draw.uniform(0.0, 0.4) for _ in range(STORM)]

    def leave(number: int) -> None:
        prompt = token_array(1000, seed=5000 + number)
        if number % 3 == 0:
            with GrpcStream(system.cluster, prompt, 200, deadline=max(delays[number], 0.001)) as stream:
                assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        elif number % 3 == 1:
            with GrpcStream(system.cluster, prompt, 200):
                moment_of(delays[number])
        else:
            body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": number % 2 == 0}
            with RawStream(system, post("/v1/completions", body)):
                moment_of(delays[number])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(STORM)))
    sent = transferred(system)
    with ExitStack() as stack:
        for number in range(25):
            body = {"prompt": token_array(1000, seed=6000 + number), "max_tokens": 200, "stream": True}
            stack.enter_context(RawStream(system, post("/v1/completions", body)))
        # A counter: a transfer that is under way could be missed.
        eventually(lambda: transferred(system) > sent, what="a transfer")
    system.cluster.wait_idle()
    # Slots are granted to a pair for as long as it lasts.
    eventually(lambda: system.cluster.status("decode-0").staging == slots, what="all slots as they were")
    for _ in range(20):
        assert system.send(CONTROL).text == system.control_text
    system.assert_alive()


def transferred(system: System) -> int:
    """Bytes of KV that have left the prefill worker."""
    return system.cluster.status("prefill-0").transfer_bytes_sent_total


def moment_of(seconds: float) -> None:
    """When a client leaves is what this case draws."""
    threading.Event().wait(seconds)
