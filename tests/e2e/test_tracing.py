"""One request is one trace over gateway, decode and prefill; without a collector nothing is traced."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import PATIENCE, Cluster, eventually, running_cluster
from tests.e2e.otlp_collector import CollectedSpan, Collector, running_collector
from tests.factories.http import NO_TLS
from tests.factories.served_model import WORKER_MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GATEWAY, DECODE, PREFILL = "tandem-gateway", "tandem-decode", "tandem-prefill"
#: The ladder of a request that is prefilled apart, and who tells of it.
APART = {
    (GATEWAY, "queue"),
    (GATEWAY, "route"),
    (PREFILL, "prefill"),
    (PREFILL, "transfer"),
    (GATEWAY, "first token"),
    (GATEWAY, "decode"),
    (DECODE, "decode"),
}
ON_DECODE = APART - {(PREFILL, "prefill"), (PREFILL, "transfer")} | {(DECODE, "prefill")}
CALLER = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tiny_model: Path, make_scratch: Callable[[], Path], collector: Collector) -> Iterator[Cluster]:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with running_cluster(tiny_model, make_scratch(), worker_options=WORKER_MEMORY, env=env) as cluster:
        yield cluster


def complete(cluster: Cluster, num_prompt_tokens: int, trace_id: str) -> None:
    """One request of a caller that traces; it finds nothing in a cache."""
    prompt = list(range(3, 3 + num_prompt_tokens))
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "cache_salt": trace_id}
    headers = {"traceparent": f"00-{trace_id}-{CALLER}-01"}
    url = f"{cluster.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, trust_env=False, verify=NO_TLS, timeout=PATIENCE)
    assert answer.status_code == httpx.codes.OK, answer.text


@pytest.mark.parametrize(
    ("num_prompt_tokens", "ladder"), [(250, APART), (10, ON_DECODE)], ids=["prefilled apart", "prefilled on decode"]
)
def test_one_trace_over_all_processes(
    traced: Cluster, collector: Collector, num_prompt_tokens: int, ladder: set[tuple[str, str]]
) -> None:
    trace_id = f"{num_prompt_tokens:032x}"
    complete(traced, num_prompt_tokens, trace_id)

    def all_there() -> list[CollectedSpan]:
        spans = collector.trace(trace_id)
        return spans if len(spans) > len(ladder) else []

    spans = eventually(all_there, what="a span of each stage")
    (root,) = [span for span in spans if span.parent_id == CALLER]
    assert (root.service, root.name) == (GATEWAY, "POST /v1/completions")
    stages = {(span.service, span.name): span for span in spans if span is not root}
    assert stages.keys() == ladder and len(stages) == len(spans) - 1
    assert {span.parent_id for span in stages.values()} == {root.span_id}
    # One machine, one clock: every stage lies within the request, give or take what a message takes.
    slack = int(0.25e9)
    for span in stages.values():
        assert root.start - slack <= span.start <= span.end <= root.end + slack, span


def test_stages_follow_each_other(traced: Cluster, collector: Collector) -> None:
    trace_id = "c" * 32
    complete(traced, 260, trace_id)
    spans = eventually(
        lambda: found if len(found := collector.trace(trace_id)) > len(APART) else [], what="a span of each stage"
    )
    stages = {(span.service, span.name): span for span in spans}
    queue, route, first = (stages[GATEWAY, name] for name in ("queue", "route", "first token"))
    assert queue.start <= route.start <= first.start
    assert first.end <= stages[GATEWAY, "decode"].start + 1_000_000
    assert route.attributes["tandem.decode_worker"] == "decode-0"
    assert route.attributes["tandem.prefill_workers"] == ["prefill-0"]
    assert stages[PREFILL, "transfer"].attributes["tandem.bytes"] > 0
    assert stages[PREFILL, "prefill"].attributes["tandem.worker"] == "prefill-0"
    assert stages[DECODE, "decode"].attributes["tandem.output_tokens"] == 12


def test_off_by_default(served: Cluster, traced: Cluster, collector: Collector) -> None:
    """The caller's trace id is no reason to trace."""
    trace_id = "d" * 32
    complete(served, 250, trace_id)
    served.wait_idle()
    # Whatever was sent before this one has arrived when it has.
    complete(traced, 10, "e" * 32)
    eventually(lambda: collector.trace("e" * 32), what="another trace")
    assert collector.trace(trace_id) == []
