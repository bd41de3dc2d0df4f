"""What came of a request, in one form for every API, so that answers can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: What parts of a character, and values that JSON cannot hold, are written as differs with the API; their number not.
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Scored:
    """One position: the log probability of its token (None at the first of a prompt), and those of the best."""

    token: str
    logprob: float | None
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Call:
    name: str = ""
    arguments: str = ""


@dataclass
class Choice:
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    scores: list[Scored] = field(default_factory=list)


@dataclass
class Outcome:
    choices: list[Choice]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_scores: list[Scored] = field(default_factory=list)

    @classmethod
    def empty(cls, num_choices: int) -> "Outcome":
        return cls([Choice() for _ in range(num_choices)])


def differences(one: Outcome, other: Outcome) -> list[str]:
    """In words; none if they are equal in all but cached tokens."""
    found = []
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(one, name) != getattr(other, name):
            found.append(f"{name}: {getattr(one, name)} != {getattr(other, name)}")
    if len(one.choices) != len(other.choices):
        return [*found, f"{len(one.choices)} choices != {len(other.choices)}"]
    for index, (mine, yours) in enumerate(zip(one.choices, other.choices, strict=True)):
        for name in ("text", "reasoning", "calls", "finish_reason", "stop_reason"):
            if getattr(mine, name) != getattr(yours, name):
                found.append(f"choice {index}, {name}: {getattr(mine, name)!r} != {getattr(yours, name)!r}")
        found += _score_differences(f"choice {index}", mine.scores, yours.scores)
    return found + _score_differences("prompt", one.prompt_scores, other.prompt_scores)


def _score_differences(where: str, mine: Sequence[Scored], yours: Sequence[Scored]) -> list[str]:
    if len(mine) != len(yours):
        return [f"{where}: {len(mine)} log probabilities != {len(yours)}"]
    return [
        f"{where}, position {position}: {a} != {b}"
        for position, (a, b) in enumerate(zip(mine, yours, strict=True))
        if not _same(a, b)
    ]


def _same(a: Scored, b: Scored) -> bool:
    if a.token != b.token or a.top.keys() != b.top.keys() or (a.logprob is None) != (b.logprob is None):
        return False
    pairs = [(a.logprob or 0.0, b.logprob or 0.0), *((a.top[token], b.top[token]) for token in a.top)]
    return all(abs(x - y) <= LOGPROB_TOLERANCE for x, y in pairs)
