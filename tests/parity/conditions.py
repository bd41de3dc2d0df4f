"""The conditions of `conditions.json` and the systems of `systems.json`: in which way a request is served."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class System:
    """What differs from a system of one prefill and one decode worker with a tiny model."""

    name: str
    #: `tiny`, or `slow`: one that can be caught in the middle of an answer.
    model: str = "tiny"
    prefill: Mapping[str, str] = field(default_factory=dict)
    decode: Mapping[str, str] = field(default_factory=dict)
    gateway: Mapping[str, str] = field(default_factory=dict)
    #: Of answers where the feature does not say; long ones are more often caught in the middle.
    max_tokens: int = 24


@dataclass(frozen=True)
class Condition:
    """Answers given in it must equal those of an undisturbed local prefill with nothing cached, one by one."""

    name: str
    system: str
    #: Gateway: `local` has prompts prefilled where they are decoded, `remote` never does if it can.
    gateway: str
    #: APIs by which it is asked.
    edges: Sequence[str]
    #: Asked twice; the second answer counts.
    cached: bool = False
    #: All features at once.
    together: bool = False
    #: A worker that is killed while many answers are under way, and started again.
    kills: str | None = None

    @property
    def gateway_name(self) -> str:
        """The gateway that every cluster has is `remote`."""
        return "gateway" if self.gateway == "remote" else self.gateway


def load_systems() -> dict[str, System]:
    return {name: System(name, **entry) for name, entry in _read("systems.json").items()}


def load_conditions() -> list[Condition]:
    return [Condition(name, **entry) for name, entry in _read("conditions.json").items()]


def _read(name: str) -> dict[str, dict[str, object]]:
    content: dict[str, dict[str, object]] = json.loads((_HERE / name).read_text(encoding="utf-8"))
    return content
