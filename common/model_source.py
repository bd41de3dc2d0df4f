"""Where a model comes from: a local folder, the prepared demo model, or a hub id. Knows no weights and no torch."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from common.cache_dir import cache_dir
from common.errors import ConfigError

DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: Weights as safetensors and everything textual that belongs to them; no pickles, no code.
_WANTED = ["*.safetensors", "*.json", "*.jinja"]


def demo_folder() -> Path:
    """Where the demo model is, once it has been converted."""
    return cache_dir() / "models" / DEMO_NAME


def model_name(model: str) -> str:
    """The name to serve `model` under if the user gives none: the folder's name, the hub id, or the demo's name."""
    if model == DEMO:
        return DEMO_NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def resolve_model(model: str) -> Path:
    """The folder of `model`: a Hugging Face folder, `demo`, or a hub id (fetched, or taken from the hub's cache).

    Raises:
        ConfigError: no such folder, a folder without config.json, or a hub id that cannot be fetched.
    """
    path = demo_folder() if model == DEMO else Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is not a model folder: it has no config.json", field="--model")
        return path.resolve()
    if model == DEMO:
        raise ConfigError("the demo model is not prepared yet; `tandem up` does it once", field="--model")
    if path.exists():
        raise ConfigError(f"{path} is a file, not a model folder", field="--model")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"no such model folder, and not a hub id (owner/name): {model}", field="--model")
    return _fetch(model)


def _fetch(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_WANTED))
    except LocalEntryNotFoundError as error:
        reason = "cannot be fetched (no connection to the hub, or no such model there), and is not in the hub's cache"
        raise ConfigError(f"{hub_id} {reason}; a local folder works too", field="--model") from error
    except (OSError, HFValidationError) as error:
        # Also the hub's own answers (no access, rate limits): HfHubHTTPError is an OSError.
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{hub_id} cannot be fetched from the hub: {first_line}", field="--model") from error
