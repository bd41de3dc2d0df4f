"""What a grammar is made of at one place of a schema: alternatives, each of one type. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.structured.regex.tree import Node

#: Number of a place in the table (`schema.table`).
NodeId = int


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON value."""


@dataclass(frozen=True, slots=True)
class Values:
    """One of these JSON values."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """`null`, or either `boolean`."""

    type: str


@dataclass(frozen=True, slots=True)
class Text:
    """A string: of a form (any of its characters), or of a length."""

    form: Node | None = None
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """A number between bounds, which belong to it unless said otherwise; whole ones have bounds that belong to it."""

    whole: bool
    low: int | float | None = None
    high: int | float | None = None
    above_low: bool = False
    below_high: bool = False
    multiple: int | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """An array: items by position, then others of one kind (None: no others)."""

    first: tuple[NodeId, ...] = ()
    rest: NodeId | None = None
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Properties:
    """An object: named properties in order, then others by the form of their names (None: any name)."""

    named: Mapping[str, NodeId] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: tuple[tuple[Node | None, NodeId], ...] = ()
    low: int = 0
    high: int | None = None
    #: The schema refuses all names but these; None: it does not, whether or not `others` come.
    sealed: frozenset[str] | None = None


Alternative = Anything | Values | Constant | Text | Number | Items | Properties
