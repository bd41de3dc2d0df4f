"""Disaggregation changes nothing: every feature in every condition, by every API, gives one and the same answer.

The matrix is data (`features.json`, `conditions.json`, `systems.json`). The reference of a system's model is what its
features give one by one, prefilled where they are decoded, with nothing cached.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.slow_model import slow_model
from tests.factories.served_model import WORKER_MEMORY
from tests.parity.conditions import Condition, System, load_conditions, load_systems
from tests.parity.features import Feature, load_features
from tests.parity.outcome import Outcome, differences
from tests.parity.rounds import INTERRUPTED, Round, memoized, run_round

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FEATURES = load_features()
CONDITIONS = load_conditions()
SYSTEMS = load_systems()
#: Prompts with fewer tokens may have no whole block to be found in a cache.
COARSEST_BLOCK = 32

Run = Callable[[Condition, str], Round]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, make_scratch: Callable[[], Path]) -> Iterator[Run]:
    """Runs a round, once. One system lives at a time; conditions of one system follow each other."""
    with ExitStack() as stack:
        running: dict[str, Cluster] = {}

        def cluster_of(system: System) -> Cluster:
            if system.name not in running:
                stack.close()
                running.clear()
                is_tiny = system.model == "tiny"
                model = tiny_model if is_tiny else slow_model(tmp_path_factory.mktemp("slow")).folder
                running[system.name] = stack.enter_context(running_system(system, model, make_scratch()))
            return running[system.name]

        def run(condition: Condition, edge: str) -> Round:
            system = SYSTEMS[condition.system]
            return run_round(cluster_of(system), condition, edge, FEATURES, system.max_tokens)

        yield memoized(run)


@contextmanager
def running_system(system: System, model: Path, scratch: Path) -> Iterator[Cluster]:
    """With a gateway `local`, if a condition asks for it, beside the one that every cluster has."""
    memory = WORKER_MEMORY if system.model == "tiny" else {"--kv-memory": "128MiB"}
    with running_cluster(
        model,
        scratch,
        worker_options={**memory, "--drain-seconds": "1"},
        prefill_options=system.prefill,
        decode_options={"--local-prefill-tokens": "0", **system.decode},
        gateway_options={"--local-prefill-tokens": "0", **system.gateway},
    ) as cluster:
        asked = [*CONDITIONS, *map(reference_for, SYSTEMS.values())]
        if any(condition.system == system.name and condition.gateway == "local" for condition in asked):
            cluster.add_gateway("local", prefill_policy="local")
            cluster.wait_gateways()
        yield cluster


def cells(condition: Condition) -> Iterator[tuple[str, Feature]]:
    """Every feature by every API of a condition that offers it."""
    for edge in condition.edges:
        for feature in FEATURES.values():
            if edge in feature.edges:
                yield edge, feature


def reference_for(system: System) -> Condition:
    """Undisturbed answers, one by one by plain HTTP: of the plain system, unless the other one's are longer."""
    plain = SYSTEMS["plain"]
    same = (system.model, system.max_tokens) == (plain.model, plain.max_tokens)
    home = plain if same else system
    return Condition(f"reference on {home.name}", home.name, "local", ("http",))


def answer_of(round_: Round, feature: Feature) -> Outcome:
    return round_.answers[feature.name].result()


@pytest.mark.parametrize("feature", FEATURES.values(), ids=lambda feature: feature.name)
def test_the_reference_is_what_was_asked_for(run: Run, feature: Feature) -> None:
    """What every answer of a feature must be is told apart from that all are equal."""
    answer = answer_of(run(reference_for(SYSTEMS["plain"]), "http"), feature)
    assert answer.cached_tokens == 0
    assert len(answer.choices) == feature.num_choices
    if feature.finish is not None:
        assert [choice.finish_reason for choice in answer.choices] == feature.finish
    for choice in answer.choices:
        assert choice.finish_reason is not None
        if feature.matches is not None:
            assert re.fullmatch(feature.matches, choice.text), choice.text
        if feature.json:
            assert isinstance(json.loads(choice.text), dict)
        for call in choice.calls:
            assert isinstance(json.loads(call.arguments), dict)
        assert bool(choice.calls) == (choice.finish_reason == "tool_calls")


@pytest.mark.parametrize(
    ("condition", "edge", "feature"),
    [
        pytest.param(condition, edge, feature, id=f"{condition.name}-{edge}-{feature.name}")
        for condition in CONDITIONS
        for edge, feature in cells(condition)
    ],
)
def test_the_same_answer(run: Run, condition: Condition, edge: str, feature: Feature) -> None:
    # The reference first: it may need another system.
    reference = answer_of(run(reference_for(SYSTEMS[condition.system]), "http"), feature)
    answer = answer_of(run(condition, edge), feature)
    assert differences(answer, reference) == []
    if feature.whole or not condition.cached:
        # A killed or preempted request finds its own blocks again.
        undisturbed = condition.kills is None and "preempted" not in condition.name
        assert answer.cached_tokens == 0 or not undisturbed
    elif answer.prompt_tokens > COARSEST_BLOCK:
        assert answer.cached_tokens > 0


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_the_condition_came_about(run: Run, condition: Condition) -> None:
    """Answers that nothing happened to would show nothing."""
    for edge in condition.edges:
        round_ = run(condition, edge)
        if condition.kills is not None and condition.kills.startswith("decode"):
            assert len(round_.interrupted) >= INTERRUPTED, round_.interrupted
        if condition.name.startswith("preempted"):
            assert round_.preemptions > 0
        if condition.gateway == "remote" and condition.kills is None:
            assert round_.transferred_bytes > 0
        if condition.gateway == "local" and condition.kills is None:
            assert round_.transferred_bytes == 0
