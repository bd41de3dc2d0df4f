"""The systems under judgement. What starts slowly is shared; each test leaves it well, which is checked."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cases.case_data import Case, load_cases
from tests.cases.system import MONOLITH, System, wait_for_gateway
from tests.cases.vocabulary import Vocabulary
from tests.e2e import slow_model
from tests.e2e.cluster import running_cluster
from tests.e2e.conftest import demo_model, make_scratch, scratch, tiny_model
from tests.e2e.failure_fixtures import WORKER_OPTIONS
from tests.factories.served_model import MAX_LENGTH, WORKER_MEMORY

__all__ = ["demo_model", "make_scratch", "scratch", "tiny_model"]

#: A prompt that is a multiple of one block is tried with each length up to two of them.
BLOCK_SIZE = 16
#: Of the demo model here, which could take more.
CONTEXT = 2048
#: Every prompt is computed on the prefill worker, be it one token long.
ALWAYS_APART = {"--local-prefill-tokens": "0"}
TINY_WORKERS = {
    **WORKER_MEMORY,
    "--kv-memory": "96MiB",
    "--block-size": str(BLOCK_SIZE),
    "--max-batch-tokens": "512",
}
DEMO_WORKERS = {
    "--kv-memory": "512MiB",
    "--block-size": str(BLOCK_SIZE),
    "--max-model-len": str(CONTEXT),
    "--staging-memory": "8MiB",
    "--slot-bytes": "256KiB",
}


@pytest.fixture(scope="session")
def demo_cases() -> Mapping[str, Case]:
    """As they are written: for SmolLM2."""
    return load_cases()


@pytest.fixture(scope="session")
def cases(tiny_model: Path) -> Mapping[str, Case]:
    """In token ids of the tiny model."""
    return load_cases(Vocabulary.of(tiny_model))


# --- the systems; each is started once by each process of pytest that runs tests of it -----------------


@pytest.fixture(scope="session")
def shared_tiny(tiny_model: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    """A tiny random model on a prefill and a decode worker, with a monolithic gateway beside the first."""
    with running_cluster(
        tiny_model,
        make_scratch(),
        worker_options=TINY_WORKERS,
        decode_options=ALWAYS_APART,
        gateway_options=ALWAYS_APART,
    ) as cluster:
        cluster.add_gateway(MONOLITH, prefill_policy="local")
        wait_for_gateway(cluster, MONOLITH)
        yield System.fresh(cluster, context=MAX_LENGTH, block_size=BLOCK_SIZE)


@pytest.fixture(scope="session")
def shared_demo(demo_model: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    """SmolLM2-135M-Instruct in fp32 on the same kind of system."""
    with running_cluster(
        demo_model,
        make_scratch(),
        worker_options=DEMO_WORKERS,
        decode_options=ALWAYS_APART,
        gateway_options=ALWAYS_APART,
    ) as cluster:
        cluster.add_gateway(MONOLITH, prefill_policy="local")
        wait_for_gateway(cluster, MONOLITH)
        yield System.fresh(cluster, context=CONTEXT, block_size=BLOCK_SIZE)


@pytest.fixture(scope="session")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is slow enough to be caught in each phase of a request."""
    return slow_model.slow_model(tmp_path_factory.mktemp("slow-model")).folder


@pytest.fixture(scope="session")
def shared_slow(slow_folder: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    """Whose processes are stopped, killed and frozen. All have time to finish; prefill that hangs is left soon."""
    time_to_finish = {"--drain-seconds": "300"}
    with running_cluster(
        slow_folder,
        make_scratch(),
        worker_options={**WORKER_OPTIONS, **time_to_finish},
        decode_options={"--prefill-timeout": "2"},
        gateway_options=time_to_finish,
    ) as cluster:
        yield System.fresh(cluster, context=slow_model.MAX_LENGTH)


# --- for one test; ALIVE is checked behind it ------------------------------------------------------------


@pytest.fixture
def system(shared_tiny: System) -> Iterator[System]:
    """With the tiny model, which is what a test takes that does not need another."""
    yield shared_tiny
    shared_tiny.assert_alive()


@pytest.fixture
def demo_system(shared_demo: System) -> Iterator[System]:
    yield shared_demo
    shared_demo.assert_alive()


@pytest.fixture
def slow_system(shared_slow: System) -> Iterator[System]:
    """Whole again after the test: who is dead is started again."""
    yield shared_slow
    shared_slow.cluster.restore()
    shared_slow.note_processes()
    shared_slow.assert_alive()
