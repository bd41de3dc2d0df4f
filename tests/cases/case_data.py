"""The cases of `cases.json` as values: their requests, with placeholders filled in. Sends and judges nothing."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.cases.vocabulary import Vocabulary

FILE = Path(__file__).with_name("cases.json")

#: Name under which `tests.e2e.cluster` serves every model, and the key of systems that want one.
MODEL = "test-model"
KEY = "sk-cases-0123456789"

Json = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One HTTP request of a case."""

    name: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    #: What the body is made of; None: no body, or one that is no JSON.
    body: Any = None
    #: The bytes to send; None: no body.
    content: bytes | None = None

    @property
    def streamed(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True

    def changed(self, **fields: Any) -> "Variant":
        """The same request with other fields in its JSON body; None takes a field out."""
        assert isinstance(self.body, dict), f"{self.name} has no JSON object to change"
        body = {name: value for name, value in {**self.body, **fields}.items() if value is not None}
        return Variant(self.name, self.method, self.path, self.headers, body, as_bytes(body))

    def said_in(self, vocabulary: Vocabulary) -> "Variant":
        """The same request with token ids of another model."""
        if not isinstance(self.body, dict):
            return self
        said = {name: vocabulary.said(name, value) for name, value in self.body.items()}
        # What is sent as raw bytes stays as it is.
        return self if said == self.body else replace(self, body=said, content=as_bytes(said))


@dataclass(frozen=True)
class Case:
    id: str
    kind: str
    request: Mapping[str, Any]
    #: Of the model that is to be asked.
    vocabulary: Vocabulary = field(default_factory=Vocabulary)

    @property
    def variants(self) -> dict[str, Variant]:
        """By name, in order; `$each` makes one for each value, named "name #value"."""
        entries = self.request.get("variants", ())
        made = [variant.said_in(self.vocabulary) for entry in entries for variant in _variants(entry)]
        named = {variant.name: variant for variant in made}
        assert len(named) == len(made), f"two variants of {self.id} have one name"
        return named

    @property
    def single(self) -> Variant:
        """The one request of a case that injects faults."""
        (variant,) = _variants({"name": self.id, **self.request["request"]})
        return variant


def load_cases(vocabulary: Vocabulary | None = None) -> dict[str, Case]:
    """With token ids of SmolLM2, or as said in another `vocabulary`."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    own = vocabulary or Vocabulary()
    return {entry["id"]: Case(entry["id"], entry["kind"], entry["request"], own) for entry in entries}


def post(path: str, body: Json, name: str = "") -> Variant:
    """A request that a case describes in words."""
    filled = {"model": MODEL, **body}
    return Variant(name, "POST", path, {}, filled, as_bytes(filled))


def as_bytes(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _variants(entry: Mapping[str, Any]) -> Iterator[Variant]:
    headers = {name: value.replace("KEY", KEY) for name, value in entry.get("headers", {}).items()}
    head = (entry["method"], entry["path"], headers)
    if "raw_body" in entry or "raw_body_hex" in entry:
        raw = entry["raw_body"].encode() if "raw_body" in entry else bytes.fromhex(entry["raw_body_hex"])
        content = raw.replace(b"MODEL", MODEL.encode())
        yield Variant(entry["name"], *head, _lenient_json(content), content)
    elif "body" in entry:
        body = _filled(entry["body"])
        each = {name: value["$each"] for name, value in body.items() if isinstance(value, dict) and "$each" in value}
        for suffix, chosen in _runs(each):
            whole = {**body, **chosen}
            yield Variant(entry["name"] + suffix, *head, whole, as_bytes(whole))
    else:
        yield Variant(entry["name"], *head)


def _runs(each: Mapping[str, str]) -> Iterator[tuple[str, Json]]:
    """For {"seed": "1..40"}: (" #1", {"seed": 1}) and so on."""
    if not each:
        yield "", {}
        return
    ((name, bounds),) = each.items()
    first, last = map(int, bounds.split(".."))
    for value in range(first, last + 1):
        yield f" #{value}", {name: value}


def _lenient_json(content: bytes) -> Any:
    """With NaN and Infinity, which the twin can send; None if it is not JSON at all."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def _filled(value: Any) -> Any:
    """`value` with its placeholders replaced, at any depth; `$each` is left for `_runs`."""
    if isinstance(value, dict):
        return _generated(value["$generate"]) if "$generate" in value else {k: _filled(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return MODEL if value == "MODEL" else value


# --- what `$generate` describes -----------------------------------------------------------------------

_GENERATORS: Mapping[str, Callable[[int], Any]] = {
    r"token array of (\d+) ids": lambda count: token_array(count, seed=count),
    r"text of (\d+) tokens": lambda count: text_of(count),
    r"(\d+) distinct strings": lambda count: [f"value {number}" for number in range(count)],
}


def _generated(description: str) -> Any:
    for pattern, generate in _GENERATORS.items():
        if found := re.fullmatch(pattern, description):
            return generate(int(found[1]))
    raise ValueError(f"nothing is known of {description!r}")


def token_array(count: int, *, seed: int) -> list[int]:
    """Ordinary tokens of any model with at least 300; another seed shares no prefix."""
    return random.Random(seed).choices(range(20, 300), k=count)


def text_of(count: int) -> str:
    """A text of `count` tokens of SmolLM2 (one for each short word with the space before it)."""
    words = ("one", "two", "three", "four", "five", "six", "seven")
    return " ".join(words[number % len(words)] for number in range(count))
