"""A running system under judgement: sends the requests of cases by both doors, and knows whether it is still well."""

import math
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.cases.case_data import Case, Json, Variant, post
from tests.cases.processes import resident_bytes
from tests.cases.replies import Replies, Reply
from tests.cases.twin import STATUSES, NotExpressible, TwinReply, call_twin, twin_request
from tests.e2e.cluster import PATIENCE, START_PATIENCE, Cluster, Member, eventually
from tests.e2e.loopback import get, request

CONTROL = post(
    "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}, name="CONTROL"
)
#: A gateway beside the first one whose prompts are all computed where they are decoded.
MONOLITH = "monolith"


@dataclass
class System:
    """A cluster and what is right for it."""

    cluster: Cluster
    #: Longest prompt plus output in tokens.
    context: int
    block_size: int = 16
    #: Sent with every request.
    headers: Mapping[str, str] = field(default_factory=dict)
    control_text: str = ""
    pids: dict[str, int] = field(default_factory=dict)

    @classmethod
    def fresh(cls, cluster: Cluster, *, context: int, **options: Any) -> Self:
        """Of a cluster that nobody has used."""
        system = cls(cluster, context, **options)
        system.control_text = system.send(CONTROL).text
        system.note_processes()
        return system

    def note_processes(self) -> None:
        """The processes that run now are those that must go on running."""
        self.pids = self._pids()

    def _pids(self) -> dict[str, int]:
        return {name: m.process.pid for name, m in self.cluster.members.items() if m.process is not None and m.alive}

    # --- asking ----------------------------------------------------------------------------------------

    def send(self, variant: Variant, *, gateway: str = "gateway", headers: Mapping[str, str] | None = None) -> Reply:
        """Read to the end."""
        begun = time.monotonic()
        all_headers = {"Content-Type": "application/json", **self.headers, **variant.headers, **(headers or {})}
        url = self.cluster.url_of(gateway) + variant.path
        answer = request(variant.method, url, content=variant.content, headers=all_headers, timeout=4 * PATIENCE)
        return Reply(variant, answer.status_code, answer.headers, answer.content, time.monotonic() - begun)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """From the first gateway, as anybody may ask it."""
        return get(self.cluster.url + path, timeout=PATIENCE, **options)

    def complete(self, prompt: Any, *, gateway: str = "gateway", **fields: Any) -> Reply:
        """A greedy completion, unless the fields say otherwise."""
        return self.send(post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields}), gateway=gateway)

    def chat(self, messages: Sequence[Json], *, gateway: str = "gateway", **fields: Any) -> Reply:
        body = {"messages": list(messages), "temperature": 0, **fields}
        return self.send(post("/v1/chat/completions", body), gateway=gateway)

    def send_all(self, variants: Iterable[Variant], *, at_once: int = 4, gateway: str = "gateway") -> list[Reply]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda variant: self.send(variant, gateway=gateway), variants))

    def run(self, case: Case, *, at_once: int = 4) -> Replies:
        """The replies to all variants of a case."""
        variants = case.variants
        replies = self.send_all(variants.values(), at_once=at_once)
        return Replies(dict(zip(variants, replies, strict=True)))

    def twin(self, variant: Variant) -> TwinReply | None:
        """The same request by gRPC; None if no message can say it."""
        try:
            request = twin_request(variant)
        except NotExpressible:
            return None
        metadata = tuple((name.lower(), value) for name, value in self.headers.items())
        return call_twin(self.cluster.grpc_target, request, metadata=metadata)

    def assert_twin_agrees(self, reply: Reply, *, same_text: bool = True) -> TwinReply | None:
        """The gRPC twin has the status that goes with the HTTP one, and the same text."""
        twin = self.twin(reply.variant)
        if twin is None:
            return None
        assert twin.code.name in STATUSES[reply.status], f"{reply} but {twin}"
        if reply.status == 200 and same_text:
            assert (twin.texts, twin.finish_reasons) == (reply.texts, reply.finish_reasons), reply
        return twin

    # --- how it is -------------------------------------------------------------------------------------

    def metric(self, name: str, *families: str, **labels: str) -> float:
        """Sum of these metrics' samples with these labels, all of one moment; 0 if there is none."""
        return sum(
            sample.value
            for found in text_string_to_metric_families(self.cluster.metrics(name))
            for sample in found.samples
            if sample.name in families and labels.items() <= sample.labels.items()
        )

    def requests_begun(self) -> float:
        """Requests that have reached the gateway, ended or not: what only grows cannot be missed by one who looks."""
        return self.metric("gateway", "tandem_gateway_requests_running", "tandem_gateway_requests_total")

    def assert_alive(self) -> None:
        """ALIVE of the legend, and nothing is held by anybody."""
        assert self._pids() == self.pids, "a process has ended or was started again"
        self.wait_idle()
        control = self.send(CONTROL)
        assert control.text == self.control_text
        assert control.seconds < 30, control.seconds
        assert self.get("/health").status_code == 200
        assert self.get("/ready").status_code == 200
        self.wait_idle()
        assert self._pids() == self.pids, "a process has ended or was started again"

    def wait_idle(self) -> None:
        """Until no worker holds anything and no gateway has a request."""
        self.cluster.wait_idle()
        for name, member in self.cluster.members.items():
            if member.module == "gateway" and member.alive:
                eventually(lambda name=name: self._is_idle(name), what=f"{name} being idle")

    def _is_idle(self, gateway: str) -> bool:
        return not self.metric(gateway, "tandem_gateway_requests_running", "tandem_gateway_queue_waiting")

    def resident_bytes(self) -> dict[str, int]:
        """Memory of each process."""
        return {name: resident_bytes(pid) for name, pid in self._pids().items()}


@contextmanager
def joined(system: System, name: str, **options: str) -> Iterator[Member]:
    """A worker more for as long as the block runs, which need not be ready yet; it takes its leave at the end."""
    member = system.cluster.add_worker(name, **options)
    try:
        yield member
    finally:
        system.cluster.members.pop(name).kill(signal.SIGTERM)


@contextmanager
def gateway_beside(system: System, name: str, **options: str) -> Iterator[Member]:
    """A gateway more for as long as the block runs; it is ready."""
    member = system.cluster.add_gateway(name, **options)
    try:
        wait_for_gateway(system.cluster, name)
        yield member
    finally:
        system.cluster.members.pop(name).kill()


def seen_through(system: System, member: Member, **fields: Any) -> System:
    """The same workers with `member` as the gateway; `fields` of the system that differ."""
    cluster = system.cluster
    view = replace(cluster, members={**cluster.members, "gateway": member})
    return replace(system, cluster=view, **fields)


def wait_for_gateway(cluster: Cluster, name: str) -> None:
    """Until it says that it is ready."""

    def ready() -> bool:
        try:
            return get(f"{cluster.url_of(name)}/ready", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    eventually(ready, seconds=START_PATIENCE, what=f"{name} being ready")


def assert_finite(values: Iterable[float]) -> None:
    """Log probabilities as JSON can have them."""
    assert all(math.isfinite(value) and value <= 0 for value in values)
