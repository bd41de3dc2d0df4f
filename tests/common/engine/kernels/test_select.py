"""Which kernels a device and dtype get, and what choosing imports."""

import subprocess
import sys

import pytest
import torch

from common.engine.kernels import create_kernels

CPU = torch.device("cpu")


def test_fp32_on_the_cpu_is_native() -> None:
    assert create_kernels(CPU, torch.float32).name == "cpu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_the_cpu_is_torchs(dtype: torch.dtype) -> None:
    assert create_kernels(CPU, dtype).name == "reference"


def test_a_gpu_gets_triton() -> None:
    pytest.importorskip("triton")
    assert create_kernels(torch.device("cuda"), torch.bfloat16).name == "triton"


def test_triton_is_imported_only_when_selected() -> None:
    script = """
import sys, torch
from common.engine.kernels import create_kernels
create_kernels(torch.device("cpu"), torch.float32)
print(sorted(name for name in sys.modules if name.split(".")[0] == "triton"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
