"""The JSON files of a model folder: config.json, generation_config.json. Knows no tensors."""

import json
from pathlib import Path
from typing import Any

from common.engine.models.config import ModelConfig
from common.errors import ModelError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def load_config(folder: Path) -> ModelConfig:
    """The model's config.

    Raises:
        ModelError: no such folder or file, or a field that cannot be served.
    """
    return ModelConfig.from_dict(read_config(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json as it is."""
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist")
    return read_json(folder / CONFIG)


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer: generation_config.json's, else config.json's, else none."""
    generation = read_json(folder / GENERATION_CONFIG) if (folder / GENERATION_CONFIG).exists() else {}
    for name, raw in ((GENERATION_CONFIG, generation), (CONFIG, read_config(folder))):
        value = raw.get("eos_token_id")
        if value is not None:
            return _token_ids(name, value)
    return ()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ModelError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(
            f"{name}: eos_token_id = {value!r}: must be a token id or a list of them", field="eos_token_id"
        )
    return tuple(ids)
