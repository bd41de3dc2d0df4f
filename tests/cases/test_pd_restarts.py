"""PD-04 and PD-05: prefill that stops, hangs or has no memory costs time only; who comes back is used again."""

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.cases.case_data import Case, Variant, post, token_array
from tests.cases.replies import Reply
from tests.cases.streams import RawStream
from tests.cases.system import CONTROL, System, joined
from tests.e2e.cluster import eventually
from tests.e2e.failure_fixtures import registered, seize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


# --- PD-04: prefill fails -----------------------------------------------------------------------------


@pytest.fixture
def failing(slow_system: System, cases: Mapping[str, Case]) -> Iterator["Failing"]:
    """Whole again after the test, with decode and gateway untouched."""
    untouched = {name: pid for name, pid in slow_system.pids.items() if not name.startswith("prefill")}
    yield Failing(slow_system, cases["PD-04"].single)
    slow_system.cluster.restore()
    slow_system.note_processes()
    assert untouched.items() <= slow_system.pids.items()
    eventually(lambda: used_prefill(slow_system), what="the prefill worker being used again")


def used_prefill(system: System, *, length: int = 100) -> bool:
    """Whether a new prompt was computed on the prefill worker; it is answered in any case."""
    before = system.cluster.status("prefill-0").finished_total
    assert system.complete(token_array(length, seed=random.randrange(10**9)), max_tokens=2).status == 200
    return system.cluster.status("prefill-0").finished_total > before


class Failing:
    """The request of the case, its text cut to what the slow model takes (a token for each character)."""

    def __init__(self, system: System, request: Variant) -> None:
        self.system = system
        content = request.body["messages"][0]["content"][:1400]
        self.request = request.changed(messages=[{"role": "user", "content": content}], temperature=0)

    def fresh(self) -> Variant:
        """With nothing of it in a cache."""
        return self.request.changed(cache_salt=str(random.randrange(10**9)))

    @contextmanager
    def prefilling(self) -> Iterator[RawStream]:
        """The request, on the prefill worker in mid-prompt."""
        cluster = self.system.cluster
        ended: list[int] = []

        def ask() -> RawStream:
            ended[:] = [cluster.status("prefill-0").finished_total]
            return RawStream(self.system, self.fresh())

        def in_mid_prompt() -> bool:
            status = cluster.status("prefill-0")
            return status.queued_tokens > 0 and status.transfers > 0

        def passed() -> bool:
            return cluster.status("prefill-0").finished_total > ended[0]

        with seize(ask, in_mid_prompt, passed) as stream:
            yield stream

    def right(self) -> str:
        return self.system.send(self.fresh()).text

    def assert_served(self, reply: Reply, right: str) -> None:
        """Our choice of the case's: decode prefills in the place of a worker that failed."""
        assert reply.status == 200, reply
        assert reply.text == right
        self.system.cluster.wait_idle(workers=["decode-0"])


def test_pd_04_prefill_stopped(failing: Failing) -> None:
    """It is the same worker under the same address that comes back, with nothing of the old one: see PD-05."""
    cluster, right = failing.system.cluster, failing.right()
    old = cluster.status("prefill-0").incarnation
    cluster.members["prefill-0"].kill()
    failing.assert_served(failing.system.send(failing.fresh()), right)
    # Its place is taken by one whose pool cannot hold the prompt: it refuses the hand-over.
    with joined(failing.system, "prefill-1", kv_memory="0.5MiB"):
        eventually(lambda: "prefill-1" in cluster.status("decode-0").paired, what="the pair without memory")
        failing.assert_served(failing.system.send(failing.fresh()), right)
    cluster.restore()
    serve(failing.system)
    assert cluster.status("prefill-0").incarnation != old


def test_pd_04_prefill_killed_in_mid_prompt(failing: Failing) -> None:
    right = failing.right()
    with failing.prefilling() as stream:
        failing.system.cluster.members["prefill-0"].kill()
        failing.assert_served(stream.read_to_end(), right)


def test_pd_04_prefill_hangs_with_half_of_it_sent(failing: Failing) -> None:
    right = failing.right()
    with failing.prefilling() as stream, failing.system.cluster.members["prefill-0"].frozen():
        failing.assert_served(stream.read_to_end(), right)


# --- PD-05: restarts ----------------------------------------------------------------------------------


def serve(system: System, count: int = 3) -> None:
    """The first request after readiness succeeds, and the others."""
    for number in range(count):
        assert system.send(CONTROL).text == system.control_text, number
        reply = system.complete(token_array(200, seed=random.randrange(10**9)), max_tokens=4, ignore_eos=True)
        assert reply.usage["completion_tokens"] == 4


@pytest.mark.parametrize("names", [["decode-0"], ["prefill-0", "decode-0"]], ids=["decode", "both"])
def test_pd_05_restarted_under_the_same_address(slow_system: System, names: list[str]) -> None:
    """Prefill alone is restarted in PD-04, the gateway alone in OP-06."""
    system, cluster = slow_system, slow_system.cluster
    serve(system)
    untouched = {name: pid for name, pid in system.pids.items() if name not in names}
    old = {name: cluster.status(name).incarnation for name in names}
    for name in names:
        cluster.members[name].kill()
    cluster.restore()
    serve(system)
    system.note_processes()
    assert untouched.items() <= system.pids.items()
    for name, incarnation in old.items():
        assert cluster.status(name).incarnation != incarnation
    # The pair was made anew, and is used.
    eventually(lambda: used_prefill(system), what="the prefill worker being used again")
    eventually(lambda: registered(cluster) == {"prefill-0", "decode-0"}, what="nobody else in the registry")


def test_pd_05_one_of_two_prefill_workers_under_load(slow_system: System) -> None:
    system, cluster = slow_system, slow_system.cluster
    cluster.add_worker("prefill-1")
    cluster.wait_ready()
    load = [
        post("/v1/completions", {"prompt": token_array(300, seed=n), "max_tokens": 10, "temperature": 0})
        for n in range(8)
    ]
    calm = [reply.texts for reply in system.send_all(load, at_once=8)]
    fresh = [variant.changed(cache_salt="under load") for variant in load]
    accepted = cluster.status("prefill-1").accepted_total
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(system.send, variant) for variant in fresh]
        eventually(lambda: cluster.status("prefill-1").accepted_total > accepted, what="a prompt on prefill-1")
        cluster.members["prefill-1"].kill()
        cluster.restore()
        assert [future.result().texts for future in running] == calm
    serve(system, 2)
    # Gone for good: its entry lapses.
    cluster.members.pop("prefill-1").kill()
    eventually(lambda: registered(cluster) == {"prefill-0", "decode-0"}, what="its entry to lapse")
