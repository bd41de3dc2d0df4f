"""Every Triton kernel compiles to machine code for the GPUs that it is meant for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

#: What a program may use of a multiprocessor's shared memory, in bytes.
SHARED_MEMORY = {"80": 163 * 1024, "90": 227 * 1024}
NUM_KERNELS = 7
#: Of 16 bits and of 32: only these are laid out differently.
DTYPES = ("bf16", "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile(capability: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    script = Path(__file__).with_name("compile_triton.py")
    command = [sys.executable, str(script), capability, *DTYPES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert len(compiled) == NUM_KERNELS * len(DTYPES)
    for name, cubin, shared in compiled:
        assert int(cubin) > 0, name
        assert int(shared) <= SHARED_MEMORY[capability], name
