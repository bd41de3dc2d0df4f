"""Tiny models of every architecture, in transformers and in ours, over every implementation of the kernels."""

from collections.abc import Iterator

import pytest
import torch

from common.engine.kernels import Kernels, create_kernels
from common.engine.kernels.reference import ReferenceKernels
from common.engine.loader import load_model
from common.engine.models.decoder import CausalLM
from tests.factories.models import TINY_MODELS, write_tiny_model
from tests.factories.oracle import Oracle, TinyModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(previous)


@pytest.fixture(scope="session", params=sorted(TINY_MODELS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp(request.param)
    return TinyModel(folder, Oracle(write_tiny_model(folder, request.param)))


@pytest.fixture(scope="session", params=["reference", "fastest"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "reference":
        return ReferenceKernels()
    fastest = create_kernels(CPU, torch.float32)
    if isinstance(fastest, ReferenceKernels):
        pytest.skip("no faster kernels on this machine")
    return fastest


@pytest.fixture(scope="session")
def model(tiny: TinyModel, kernels: Kernels) -> CausalLM:
    return load_model(tiny.folder, device=CPU, dtype=torch.float32, kernels=kernels)
