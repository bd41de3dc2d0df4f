"""Runs the features through a system in one condition, alone or all at once, undisturbed or with a kill."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.e2e.cluster import Cluster
from tests.parity.conditions import Condition
from tests.parity.edges import EDGES
from tests.parity.features import Feature
from tests.parity.outcome import Outcome

#: Answers that must be under way when a decode worker is killed; it is killed as soon as so many are.
INTERRUPTED = 10
#: A prefill worker is killed when its first prompts are computed, and most are not.
BEGUN = 5


@dataclass
class Progress:
    """Who has begun to answer, and who is done."""

    begun: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    #: Names that were in the middle of their answer at the kill.
    interrupted: frozenset[str] = frozenset()
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def piece(self, name: str) -> None:
        with self._changed:
            self.begun.add(name)
            self._changed.notify_all()

    def end(self, name: str) -> None:
        with self._changed:
            self.done.add(name)
            self._changed.notify_all()

    def wait_until(self, ripe: Callable[[set[str]], bool], seconds: float) -> None:
        """Until the answers that are under way satisfy `ripe`; notes which they are."""
        with self._changed:
            self._changed.wait_for(lambda: ripe(self.begun - self.done), seconds)
            self.interrupted = frozenset(self.begun - self.done)


@dataclass(frozen=True)
class Round:
    """Answers by feature; what went wrong with a request is in its future."""

    answers: Mapping[str, Future[Outcome]]
    interrupted: frozenset[str] = frozenset()
    #: Of the decode worker, while the round ran; counted anew if it was killed.
    preemptions: int = 0
    transferred_bytes: int = 0


def run_round(
    cluster: Cluster, condition: Condition, edge: str, features: Mapping[str, Feature], max_tokens: int
) -> Round:
    """Ask for every feature that `edge` offers. Nothing runs any more when it returns, and workers hold nothing."""
    asked = {name: feature for name, feature in features.items() if edge in feature.edges}
    progress = Progress()

    def ask(feature: Feature) -> Outcome:
        body = feature.request(salt=f"{condition.name} {edge} {feature.name}", max_tokens=max_tokens)

        def once() -> Outcome:
            return EDGES[edge](cluster, condition.gateway_name, feature, body, lambda: progress.piece(feature.name))

        try:
            first = once()
            return once() if condition.cached else first
        finally:
            progress.end(feature.name)

    before = cluster.status("decode-0")
    with ThreadPoolExecutor(len(asked) if condition.together else 1) as pool:
        answers = {name: pool.submit(ask, feature) for name, feature in asked.items()}
        if condition.kills is not None:
            _kill(cluster, condition.kills, progress)
    cluster.wait_idle()
    after = cluster.status("decode-0")
    return Round(
        answers,
        progress.interrupted,
        after.preemptions_total - before.preemptions_total,
        after.transfer_bytes_received_total - before.transfer_bytes_received_total,
    )


def _kill(cluster: Cluster, name: str, progress: Progress) -> None:
    if name.startswith("decode"):
        progress.wait_until(lambda under_way: len(under_way) >= INTERRUPTED, seconds=60)
    else:
        progress.wait_until(lambda _: len(progress.begun) >= BEGUN, seconds=60)
    member = cluster.members[name]
    member.kill()
    member.start()


def memoized(run: Callable[[Condition, str], Round]) -> Callable[[Condition, str], Round]:
    """Each round is run once, however many tests look at it."""
    rounds: dict[tuple[str, str], Round] = {}

    def get(condition: Condition, edge: str) -> Round:
        key = (condition.name, edge)
        if key not in rounds:
            rounds[key] = run(condition, edge)
        return rounds[key]

    return get
