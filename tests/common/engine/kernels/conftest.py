"""Native kernels for each instruction set that this CPU can run; triton's interpreter where there is no GPU."""

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.engine.kernels.cpu.kernels import CpuKernels


def instruction_sets() -> list[str]:
    """Values of TANDEM_CPU_MARCH; empty is the CPU's own."""
    if platform.machine() != "x86_64":
        return [""]
    flags = Path("/proc/cpuinfo").read_text()
    return ["", "x86-64", *(["x86-64-v3"] if "avx2" in flags and "fma" in flags else [])]


@pytest.fixture(scope="session", params=instruction_sets(), ids=lambda march: march or "native")
def cpu_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CPU_MARCH", request.param)
        return CpuKernels()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
