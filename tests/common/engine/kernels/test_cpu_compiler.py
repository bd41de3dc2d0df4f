"""Building the native kernels: once, atomically, and with a word instead of a crash where that cannot be."""

import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.engine.kernels import create_kernels
from common.engine.kernels.cpu.compiler import BuildError, build, find_compiler, library_name
from common.engine.kernels.cpu.kernels import CpuKernels

BUILD_AND_RUN = """
import torch
from common.engine.kernels.cpu.kernels import CpuKernels
print(CpuKernels().pack_linear(torch.eye(3), None)(torch.ones(1, 3)).tolist())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def hasty_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is compiled matters here, not how fast it runs: the compiler does not optimise."""
    wrapper = tmp_path / "hasty-c++"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(find_compiler())} "$@" -O0\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))


@pytest.mark.slow
@pytest.mark.usefixtures("hasty_compiler")
def test_processes_may_race_for_an_empty_cache(cache: Path) -> None:
    command = [sys.executable, "-c", BUILD_AND_RUN]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    assert [racer.communicate()[0].strip() for racer in racers] == ["[[1.0, 1.0, 1.0]]"] * 2
    assert [racer.returncode for racer in racers] == [0] * 2
    assert len(list(cache.iterdir())) == 1, "an unfinished file was left"


def test_a_built_library_is_not_built_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    built = cache / library_name(find_compiler())
    built.write_bytes(b"as if compiled")
    assert build() == built
    assert built.read_bytes() == b"as if compiled"


def test_the_name_depends_on_flags_and_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = library_name(["g++"])
    monkeypatch.setenv("TANDEM_CPU_MARCH", "x86-64-v2")
    assert library_name(["g++"]) != plain
    monkeypatch.delenv("TANDEM_CPU_MARCH")
    (other := tmp_path / "other-g++").symlink_to("/usr/bin/g++")
    assert library_name([str(other)]) != plain


@pytest.mark.usefixtures("hasty_compiler")
def test_a_cache_that_cannot_be_written_costs_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    library = build()
    assert library.exists()
    assert library.is_relative_to(tmp_path)


def test_no_compiler_is_a_build_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler found"):
        build()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo version; case $1 in --version) exit 0;; esac; echo 'x.cpp:1: error: no such thing' >&2; exit 1", "such"),
        ("exit 127", "failed"),
    ],
)
def test_a_compiler_that_fails_is_a_build_error_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, message: str
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match=message):
        build()
    assert not cache.exists() or not list(cache.iterdir())


def test_without_a_compiler_torch_serves_and_the_log_says_so_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with caplog.at_level(logging.WARNING):
        kernels = create_kernels(torch.device("cpu"), torch.float32)
    assert kernels.name == "reference"
    assert len(caplog.records) == 1
    assert "/no/such/compiler" in caplog.text


def test_threads_are_shared_with_torch() -> None:
    script = """
import os, torch
torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)
torch.randn(1 << 20).exp()
before = len(os.listdir("/proc/self/task"))
from common.engine.kernels.cpu.kernels import CpuKernels
CpuKernels().pack_linear(torch.randn(600, 600), None)(torch.randn(64, 600))
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}
print(len(os.listdir("/proc/self/task")) - before, len(runtimes))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]


def test_sources_are_found_by_every_instance() -> None:
    assert CpuKernels().name == CpuKernels().name == "cpu"
