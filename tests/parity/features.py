"""The features of `features.json`: what is asked for, and what every answer to it must be."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Feature:
    """One request, as the HTTP API takes it."""

    name: str
    #: `completions` or `chat/completions`.
    path: str
    body: Mapping[str, Any]
    #: APIs that offer it.
    edges: Sequence[str] = ("http", "sse", "grpc")
    #: Its prompt is always computed whole.
    whole: bool = False
    #: What is known of the answer beforehand: finish reasons, a regular expression of the text, that it is JSON.
    finish: Sequence[str] | None = None
    matches: str | None = None
    json: bool = False

    @property
    def num_choices(self) -> int:
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and isinstance(prompt[0], list)
        return int(self.body.get("n", 1)) * (len(prompt) if several and isinstance(prompt, list) else 1)

    def request(self, *, salt: str, max_tokens: int = 24) -> dict[str, Any]:
        """A body that shares no cache with those of another salt; `max_tokens` counts where the feature has none."""
        return {"model": "test-model", "max_tokens": max_tokens, **self.body, "cache_salt": salt}


def load_features() -> dict[str, Feature]:
    entries = json.loads((Path(__file__).parent / "features.json").read_text(encoding="utf-8"))
    return {name: _feature(name, entry) for name, entry in entries.items()}


def _feature(name: str, entry: dict[str, Any]) -> Feature:
    return Feature(name, body=_generated(entry.pop("body"), random.Random(name)), **entry)


def _generated(value: Any, source: random.Random) -> Any:
    """`{"$tokens": n}` stands for n ordinary token ids, the same in every run."""
    if isinstance(value, dict):
        if "$tokens" in value:
            return source.choices(range(5, 300), k=value["$tokens"])
        return {key: _generated(item, source) for key, item in value.items()}
    if isinstance(value, list):
        return [_generated(item, source) for item in value]
    return value
