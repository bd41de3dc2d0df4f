"""Reads the text side of a model folder: JSON files, special tokens and chat templates. Knows no tokenizer library."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON_FILE = "chat_template.json"
TEMPLATE_FOLDER = "additional_chat_templates"
DEFAULT_TEMPLATE = "default"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The named special tokens as text; None where the model has none."""

    bos: str | None = None
    eos: str | None = None
    unk: str | None = None
    pad: str | None = None

    def as_template_variables(self) -> dict[str, str]:
        """Variables as Hugging Face hands them to a template: only those that are set."""
        named = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unk, "pad_token": self.pad}
        return {name: text for name, text in named.items() if text is not None}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file. Raises ModelError if it holds anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Special tokens of `tokenizer_config.json`, completed by `special_tokens_map.json`."""
    config = read_json(folder / SPECIAL_TOKENS_FILE) | read_json(folder / CONFIG_FILE)
    return SpecialTokens(**{name: _token_text(config.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")})


def _token_text(value: object) -> str | None:
    """A token is written as a string or as an object with its `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Template sources by name, the main one under "default". Files win over `tokenizer_config.json`."""
    templates = _template_entries(read_json(folder / CONFIG_FILE).get("chat_template"))
    templates |= _template_entries(read_json(folder / TEMPLATE_JSON_FILE).get("chat_template"))
    if (main := folder / TEMPLATE_FILE).is_file():
        templates[DEFAULT_TEMPLATE] = main.read_text(encoding="utf-8")
    for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates


def _template_entries(value: object) -> dict[str, str]:
    """One source, or a list of {"name", "template"}."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value if isinstance(entry, Mapping)}
    return {}


def tokenizer_fingerprint(folder: Path) -> str:
    """Hex digest over everything that turns text into tokens: tokenizer, special tokens, chat templates.

    Equal for two copies of a folder, whatever their file times, formatting of the JSON or unrelated settings.
    """
    special = read_special_tokens(folder)
    content = {
        "tokenizer": read_json(folder / TOKENIZER_FILE),
        "special": [special.bos, special.eos, special.unk, special.pad],
        "templates": read_chat_templates(folder),
    }
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]
