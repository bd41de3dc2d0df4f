"""A client that leaves, by any door and in any phase, gets every block back on both sides, at once."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from common.sampling import FinishReason
from tests.e2e.cluster import Cluster, eventually, running_cluster
from tests.e2e.failure_fixtures import (
    WORKER_OPTIONS,
    GrpcStream,
    Judge,
    RawHttp,
    ask,
    completion_body,
    seize,
    timed,
)
from tests.e2e.slow_model import slow_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Little staging, so that KV is still on its way when the prompt is computed.
TIGHT_STAGING = {"--staging-memory": "16KiB", "--slot-bytes": "8KiB"}
LONG = 1500
ENDLESS = 2000
#: Tokens of a prompt by the phase in which it is caught: what is to be decoded must first have travelled, slowly.
LENGTHS = {"prefilling": LONG, "travelling": LONG, "decoding": 150}
#: Seconds, each for one try: a busy machine may not have come as far as is wanted when the first ones end.
DEADLINES = (1.5, 3.0, 6.0, 12.0, 24.0)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, make_scratch: Callable[[], Path]) -> Iterator[Judge]:
    model = slow_model(tmp_path_factory.mktemp("slow-model"))
    with running_cluster(model.folder, make_scratch(), worker_options={**WORKER_OPTIONS, **TIGHT_STAGING}) as cluster:
        yield Judge(cluster, model)


@dataclass
class Phases:
    """Where the one request of the cluster is now."""

    cluster: Cluster
    times: dict[str, float] = field(default_factory=dict)

    def prefilling(self) -> bool:
        status = self.cluster.status("prefill-0")
        return status.queued_tokens > 0 and status.transfers > 0

    def travelling(self) -> bool:
        status = self.cluster.status("prefill-0")
        return status.queued_tokens == 0 and status.transfers > 0

    def decoding(self) -> bool:
        status = self.cluster.status("decode-0")
        return status.running > 0 and status.transfers == 0 and status.queued_tokens == 0


@dataclass
class Door:
    """A way in, and the way out that goes with it."""

    #: Cluster, prompt, max_tokens.
    open: Callable[[Cluster, list[int], int], GrpcStream | RawHttp]

    @staticmethod
    def leave(request: GrpcStream | RawHttp) -> None:
        request.cancel() if isinstance(request, GrpcStream) else request.hang_up()


DOORS = {
    "http-stream": Door(lambda cluster, prompt, most: RawHttp(cluster, completion_body(prompt, most, stream=True))),
    "http": Door(lambda cluster, prompt, most: RawHttp(cluster, completion_body(prompt, most))),
    "grpc": Door(lambda cluster, prompt, most: GrpcStream(cluster, prompt, most)),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("phase", ["prefilling", "travelling", "decoding"])
def test_client_that_leaves_frees_both_sides(judge: Judge, phase: str, door: str) -> None:
    phases = Phases(judge.cluster)
    cancelled = judge.cluster.status("decode-0").cancelled_total
    in_phase = getattr(phases, phase)
    passed = phases.decoding if phase != "decoding" else lambda: False
    length = LENGTHS[phase]
    request = seize(lambda: DOORS[door].open(judge.cluster, judge.prompts.fresh(length), ENDLESS), in_phase, passed)
    with timed(f"{phase}, {door}: until idle", phases.times):
        Door.leave(request)
        judge.cluster.wait_idle()
    assert judge.cluster.status("decode-0").cancelled_total > cancelled, "it ended by itself"
    judge.recovered()


def computing(cluster: Cluster) -> bool:
    return any(cluster.status(worker).queued_tokens > 0 for worker in ("prefill-0", "decode-0"))


def seize_before_its_deadline(judge: Judge, length: int, max_tokens: int, in_phase: Callable[[], bool]) -> GrpcStream:
    """A stream that was seen in its phase and has a deadline to come."""
    deadlines = iter(DEADLINES)
    opened: list[GrpcStream] = []

    def open_() -> GrpcStream:
        # What is left of an earlier try is not taken for this one.
        judge.cluster.wait_idle()
        prompt = judge.prompts.fresh(length)
        opened.append(GrpcStream(judge.cluster, prompt, max_tokens, deadline=next(deadlines)))
        return opened[-1]

    stream: GrpcStream = seize(open_, in_phase, lambda: opened[-1].is_over, tries=len(DEADLINES))
    return stream


def test_deadline_ends_a_prompt_that_is_being_prefilled(judge: Judge) -> None:
    """The prompt takes longer than its deadline."""
    # Where: the router may find either side cheaper.
    with seize_before_its_deadline(judge, 3900, 100, lambda: computing(judge.cluster)) as stream:
        assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert stream.answer.num_tokens == 0
        with timed("prefilling, deadline: until idle", {}):
            judge.cluster.wait_idle()
    judge.recovered()


@pytest.mark.parametrize("phase", ["travelling", "decoding"])
def test_deadline_of_a_grpc_call_ends_it_in_later_phases(judge: Judge, phase: str) -> None:
    phases = Phases(judge.cluster)
    stream = seize_before_its_deadline(judge, LENGTHS[phase], ENDLESS, getattr(phases, phase))
    with stream, ExitStack() as stack:
        if phase == "travelling":
            # The deadline must find it there: nothing more is sent.
            stack.enter_context(judge.cluster.members["prefill-0"].frozen())
        assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with timed(f"{phase}, deadline: until decode is idle", phases.times):
            judge.cluster.wait_idle(workers=["decode-0"])
    judge.recovered()


@pytest.mark.parametrize("door", DOORS)
def test_leaving_the_gateways_queue(judge: Judge, door: str) -> None:
    """Grants are full: the last request waits in Redis, and no worker knows it."""
    times: dict[str, float] = {}
    accepted = judge.cluster.status("decode-0").accepted_total
    with ExitStack() as stack:
        streams = [stack.enter_context(GrpcStream(judge.cluster, judge.prompts.fresh(3900), 100)) for _ in range(5)]
        eventually(lambda: judge.cluster.gateway_status()["queue"]["waiting"] > 0, what="a full queue")
        request = DOORS[door].open(judge.cluster, judge.prompts.fresh(3900), 100)
        stack.callback(Door.leave, request)
        eventually(lambda: judge.cluster.gateway_status()["gateway"]["running"] == 6, what="six requests")
        assert judge.cluster.gateway_status()["queue"]["waiting"] > 0
        with timed(f"queued, {door}: until out of the queue", times):
            Door.leave(request)
            eventually(lambda: judge.cluster.gateway_status()["gateway"]["running"] == 5, what="five requests")
        for stream in streams:
            stream.cancel()
        eventually(lambda: judge.cluster.gateway_status()["queue"]["waiting"] == 0, what="an empty queue")
        eventually(lambda: judge.cluster.gateway_status()["queue"]["granted"] == 0, what="no grants")
        judge.cluster.wait_idle()
    assert judge.cluster.status("decode-0").accepted_total <= accepted + len(streams)
    judge.recovered()


def test_leaving_the_workers_own_queue(judge: Judge) -> None:
    """Two prompts do not fit the pool together: the second waits on the decode worker."""
    cluster = judge.cluster
    times: dict[str, float] = {}
    with GrpcStream(cluster, judge.prompts.fresh(3000), 1000) as first:
        first.read(1)
        with GrpcStream(cluster, judge.prompts.fresh(3200), 800) as second:
            eventually(lambda: cluster.status("decode-0").waiting == 1, what="a waiting request")
            with timed("waiting on decode, grpc: until gone", times):
                second.cancel()
                eventually(lambda: cluster.status("decode-0").waiting == 0, what="an empty line")
        # The other one never noticed.
        assert first.read(20).num_tokens >= 20
    judge.recovered()


def test_stop_string_of_one_choice_lets_the_others_go_on(judge: Judge) -> None:
    prompt = judge.prompts.fresh(200)
    whole = ask(judge.cluster, prompt, 40, n=3, temperature=1.0, seed=5)
    stop = _only_in_one(whole.choices[1].text, [whole.choices[0].text, whole.choices[2].text])
    answer = ask(judge.cluster, prompt, 40, n=3, temperature=1.0, seed=5, stop=[stop])
    assert answer.choices[1].text == whole.choices[1].text.partition(stop)[0]
    assert answer.choices[1].finish_reason == _proto(FinishReason.STOP)
    assert [answer.choices[i].text for i in (0, 2)] == [whole.choices[i].text for i in (0, 2)]
    judge.recovered()


def _only_in_one(text: str, others: list[str]) -> str:
    """Three characters of `text` that occur in no other."""
    pieces = (text[i : i + 3] for i in range(5, len(text) - 3))
    return next(p for p in pieces if "\ufffd" not in p and not any(p in other for other in others))


def _proto(reason: FinishReason) -> int:
    return {FinishReason.STOP: 1, FinishReason.LENGTH: 2}[reason]
