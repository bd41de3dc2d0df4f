"""Turns the C++ beside this file into a shared library, once per source, compiler and CPU.

Knows nothing of what the library contains.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from common.cache_dir import cache_dir

SOURCE_DIR = Path(__file__).parent / "src"
COMPILERS = ("g++", "c++", "clang++")  # g++ first: its OpenMP runtime is the one that torch has loaded
TIMEOUT_S = 120


class BuildError(Exception):
    """There is no working C++ compiler; the message is one line for the log."""


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, else the first of `COMPILERS` on the path.

    Raises:
        BuildError: there is none.
    """
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)}; set CXX to name one)")


def target_flags() -> list[str]:
    """Flags that choose the instruction set; TANDEM_CPU_MARCH (say, x86-64-v3) instead of what this CPU has."""
    if march := os.environ.get("TANDEM_CPU_MARCH"):
        return [f"-march={march}"]
    return ["-mcpu=native"] if platform.machine() in ("aarch64", "arm64") else ["-march=native"]


def compile_flags() -> list[str]:
    """Everything but files. Contraction is pinned: equal sums in different tiles must stay equal."""
    return ["-std=c++17", "-O3", *target_flags(), "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared"]


def cpu_description() -> str:
    """Model and instruction sets of this CPU: a cache may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def library_name(compiler: list[str]) -> str:
    """Changes with anything that the compiled code depends on."""
    sources = [path.read_bytes() for path in sorted(SOURCE_DIR.iterdir()) if path.suffix in (".cpp", ".h")]
    version = run([*compiler, "--version"])
    described = "\0".join([*compiler, version, *compile_flags(), cpu_description()])
    digest = hashlib.sha256(b"\0".join([*sources, described.encode()])).hexdigest()
    return f"cpu-kernels-{digest[:20]}.so"


def build() -> Path:
    """The compiled library: from the cache, or compiled now (a few seconds).

    Processes may race: each compiles into a file of its own and puts it in place atomically. Where the cache
    cannot be written, a private temporary directory serves, at the cost of compiling at every start.

    Raises:
        BuildError: no compiler, or it failed.
    """
    compiler = find_compiler()
    name = library_name(compiler)
    try:
        directory = cache_dir() / "kernels"
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / name).exists():
            return directory / name
        handle, unfinished = tempfile.mkstemp(dir=directory, suffix=".tmp")
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        directory = Path(tempfile.mkdtemp(prefix="tandem-kernels-"))
        handle, unfinished = tempfile.mkstemp(dir=directory, suffix=".tmp")
    os.close(handle)
    try:
        sources = [str(path) for path in sorted(SOURCE_DIR.glob("*.cpp"))]
        run([*compiler, *compile_flags(), *sources, "-o", unfinished])
        os.replace(unfinished, directory / name)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return directory / name


def run(command: list[str]) -> str:
    """Standard output of `command`; BuildError, with the first line of what it said, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[:200])
        raise BuildError(f"{command[0]} failed: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    return done.stdout
