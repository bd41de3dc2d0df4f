"""A regular expression as a tree: sets of characters, sequence, choice, repetition, and anchors. Values only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Inclusive ranges of code points, sorted, apart from each other, without surrogates.
Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set; none if the set is empty."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concat:
    """One after the other; nothing at all matches the empty text."""

    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of several; without any it matches nothing."""

    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; None is without end."""

    item: "Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning or the end of the text."""

    end: bool


Node = Chars | Concat | Alternation | Repeat | Anchor

EMPTY = Concat(())
NOTHING = Alternation(())


def _without_surrogates(parts: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    for low, high in parts:
        if low < _SURROGATES[0]:
            yield low, min(high, _SURROGATES[0] - 1)
        if high > _SURROGATES[1]:
            yield max(low, _SURROGATES[1] + 1), high


def union(parts: Iterable[tuple[int, int]]) -> Ranges:
    """Any ranges, brought into order; surrogates fall out."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(parts)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Every character that is not in it."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        gaps.append((start, _LAST))
    return union(gaps)


def intersection(first: Ranges, second: Ranges) -> Ranges:
    return union(
        (max(low, other_low), min(high, other_high))
        for low, high in first
        for other_low, other_high in second
        if max(low, other_low) <= min(high, other_high)
    )


def char(character: str) -> Chars:
    return Chars(((ord(character), ord(character)),))


def literal(text: str) -> Concat:
    return Concat(tuple(char(character) for character in text))


def sequence(items: Sequence[Node]) -> Node:
    """Concatenation without needless nesting; nothing matches it if nothing matches a part."""
    flat: list[Node] = []
    for item in items:
        if item == NOTHING:
            return NOTHING
        flat.extend(item.items if isinstance(item, Concat) else (item,))
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def choice(options: Sequence[Node]) -> Node:
    """Alternation without needless nesting or repeats."""
    flat: dict[Node, None] = {}
    for option in options:
        flat.update(dict.fromkeys(option.options if isinstance(option, Alternation) else (option,)))
    return next(iter(flat)) if len(flat) == 1 else Alternation(tuple(flat))


ANY_RANGES = union([(0, _LAST)])
#: Any text at all.
ANYTHING = Repeat(Chars(ANY_RANGES), 0, None)
