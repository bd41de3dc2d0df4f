"""What the benchmark sends: how long each prompt and answer is, when it comes, and what it shares with others."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from common.errors import ConfigError

#: Tokens that one `hash_ids` entry of a Mooncake trace stands for.
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """One request to come. Lengths in tokens."""

    prompt_tokens: int
    output_tokens: int
    #: Seconds after the start at which it is sent (traces); None: as the load's own rule says.
    at: float | None = None
    #: Ids of the prompt's blocks, if the trace has them: equal leading ids mean an equal beginning.
    blocks: tuple[int, ...] = ()


def uniform(count: int, prompt_tokens: int, output_tokens: int) -> list[Shape]:
    """`count` requests of equal lengths."""
    return [Shape(prompt_tokens, output_tokens)] * count


def read_trace(path: Path, limit: int | None = None) -> list[Shape]:
    """The first `limit` requests of a trace, their times counted from the first one.

    Two forms are known: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference), and JSON lines
    with timestamp (ms), input_length, output_length, hash_ids (Mooncake).

    Raises:
        ConfigError: neither of both, with the line that is wrong.
    """
    parse = _mooncake if path.suffix in (".jsonl", ".json") else _azure
    try:
        with path.open(newline="") as lines:
            shapes = list(islice(parse(lines), limit))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="--trace") from error
    if not shapes:
        raise ConfigError(f"{path} holds no request", field="--trace")
    return shapes


def _azure(lines: Iterable[str]) -> Iterator[Shape]:
    first: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # The dataset has seven digits of a second, one more than datetime reads.
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or moment
            lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError, TypeError) as error:
            raise _bad_line(number, error) from error
        yield _shape(*lengths, (moment - first).total_seconds())


def _mooncake(lines: Iterable[str]) -> Iterator[Shape]:
    first: float | None = None
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            moment = float(entry["timestamp"]) / 1000
            first = moment if first is None else first
            lengths = int(entry["input_length"]), int(entry["output_length"])
            blocks = tuple(int(block) for block in entry.get("hash_ids", ()))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise _bad_line(number, error) from error
        yield _shape(*lengths, moment - first, blocks)


def _shape(prompt_tokens: int, output_tokens: int, at: float, blocks: tuple[int, ...] = ()) -> Shape:
    # Traces hold a few requests of no output; a server always gives a token.
    return Shape(max(1, prompt_tokens), max(1, output_tokens), at, blocks)


def _bad_line(number: int, error: Exception) -> ConfigError:
    return ConfigError(f"line {number} is not a request: {error!r}", field="--trace")
