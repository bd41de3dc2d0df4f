"""The systems under judgement. What starts slowly is shared; each test leaves it well, which is checked."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cases.case_data import Case, load_cases
from tests.cases.system import MONOLITH, System, wait_for_gateway
from tests.e2e.cluster import running_cluster
from tests.e2e.conftest import demo_model, make_scratch, scratch, tiny_model
from tests.factories.served_model import MAX_LENGTH, WORKER_MEMORY

__all__ = ["demo_model", "make_scratch", "scratch", "tiny_model"]

#: Of the shared system; a prompt that is a multiple of one block is tried with each length up to two of them.
BLOCK_SIZE = 16
CONTEXT = 2048
#: Every prompt is computed on the prefill worker, be it one token long.
ALWAYS_APART = {"--local-prefill-tokens": "0"}
DEMO_WORKERS = {
    "--kv-memory": "512MiB",
    "--block-size": str(BLOCK_SIZE),
    "--max-model-len": str(CONTEXT),
    "--staging-memory": "8MiB",
    "--slot-bytes": "256KiB",
}


@pytest.fixture(scope="session")
def cases() -> Mapping[str, Case]:
    return load_cases()


@pytest.fixture(scope="session")
def shared_system(demo_model: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    """SmolLM2-135M-Instruct in fp32 on a prefill and a decode worker, with a monolithic gateway beside the first."""
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
def shared_tiny(tiny_model: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    """A tiny random model on the same kind of system, for what is asked many times or of many streams at once."""
    with running_cluster(
        tiny_model,
        make_scratch(),
        worker_options={**WORKER_MEMORY, "--kv-memory": "96MiB", "--block-size": str(BLOCK_SIZE)},
        decode_options=ALWAYS_APART,
        gateway_options=ALWAYS_APART,
    ) as cluster:
        cluster.add_gateway(MONOLITH, prefill_policy="local")
        wait_for_gateway(cluster, MONOLITH)
        yield System.fresh(cluster, context=MAX_LENGTH, block_size=BLOCK_SIZE)


@pytest.fixture
def tiny_system(shared_tiny: System) -> Iterator[System]:
    """The tiny one; ALIVE is checked after the test."""
    yield shared_tiny
    shared_tiny.assert_alive()


@pytest.fixture
def system(shared_system: System) -> Iterator[System]:
    """The shared system; ALIVE is checked after the test."""
    yield shared_system
    shared_system.assert_alive()
