"""Models and clusters of the end-to-end tests. Each costs seconds to start, so they are shared as widely as can be."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from deploy.demo_model import ensure_demo_model
from tests.e2e.cluster import PATIENCE, Cluster, running_cluster
from tests.factories.served_model import WORKER_MEMORY, write_served_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; converted once if need be."""
    return ensure_demo_model()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama with a tokenizer and a chat template, loaded in a moment."""
    folder = tmp_path_factory.mktemp("tiny-model")
    write_served_model(folder)
    return folder


@pytest.fixture(scope="session")
def make_scratch() -> Iterator[Callable[[], Path]]:
    """Makes folders with paths short enough for a unix socket; all are gone at the end."""
    folders: list[Path] = []

    def make() -> Path:
        folders.append(Path(tempfile.mkdtemp(prefix="td-")))
        return folders[-1]

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def scratch(make_scratch: Callable[[], Path]) -> Path:
    """A folder for one cluster of one test."""
    return make_scratch()


@pytest.fixture(scope="session")
def served(tiny_model: Path, make_scratch: Callable[[], Path]) -> Iterator[Cluster]:
    """One prefill and one decode worker with the tiny model. Tests leave it as they found it: idle, nobody killed."""
    with running_cluster(tiny_model, make_scratch(), worker_options=WORKER_MEMORY) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(served: Cluster) -> Iterator[OpenAI]:
    """The official client, unmodified, that never tries again."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client
