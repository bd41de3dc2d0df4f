r"""Characters that JSON strings spell as escapes, in expressions that the text between a string's quotes must match.

Each set of characters turns into a choice: those that stand for themselves, or escapes, spelled as `json.dumps` does
(`\n`, `\u0001`). The workers' compiler is quick with such a choice in a loop, slow with a counted one, and slow for one
token where one stands by itself: hence the bounds.
"""

from collections.abc import Sequence

from gateway.structured.regex.forms import JSON_RANGES, only
from gateway.structured.regex.tree import (
    NOTHING,
    Alternation,
    Anchor,
    Chars,
    Concat,
    Node,
    Ranges,
    Repeat,
    intersection,
    sequence,
)

#: Most times that a set with escapes may be repeated by a count; sets that are repeated more often have none.
MAX_ESCAPED_REPEAT = 32
#: Most sets with escapes that may stand by themselves, repetitions counted.
MAX_ESCAPED_SINGLE = 8

_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))


def plain_part(ranges: Ranges) -> Ranges:
    """Characters that stand for themselves."""
    return intersection(ranges, JSON_RANGES)


def short_escapes(ranges: Ranges) -> str:
    r"""Letters and signs that stand behind a backslash for characters of the set."""
    return "".join(sign for code, sign in _SHORT.items() if _holds(ranges, code))


def long_escapes(ranges: Ranges) -> list[tuple[str, str]]:
    r"""Of characters that are spelled `\u00..`: the last but one digit, and the last ones that go with it."""
    codes = [code for code in range(0x20) if code not in _SHORT and _holds(ranges, code)]
    digits = {high: "".join(f"{code & 15:x}" for code in codes if code >> 4 == high) for high in (0, 1)}
    return [(str(high), low) for high, low in digits.items() if low]


def has_escapes(ranges: Ranges) -> bool:
    return bool(intersection(ranges, _ESCAPED))


def bearable(tree: Node) -> Node:
    """The same, but without characters that are spelled as escapes where they would make the workers slow.

    What must have them keeps them. The tree has no anchors.
    """
    tree = _unambiguous(_bounded(tree, 1))
    if _single(tree) > MAX_ESCAPED_SINGLE:
        without = only(tree, JSON_RANGES)
        return tree if without == NOTHING else without
    return tree


def _bounded(tree: Node, times: int) -> Node:
    match tree:
        case Chars():
            plain = plain_part(tree.ranges)
            return Chars(plain) if times > MAX_ESCAPED_REPEAT and plain else tree
        case Concat():
            return Concat(tuple(_bounded(item, times) for item in tree.items))
        case Alternation():
            return Alternation(tuple(_bounded(option, times) for option in tree.options))
        case Repeat():
            counted = max(tree.low, tree.high or 0, 1)
            return Repeat(_bounded(tree.item, times * counted), tree.low, tree.high)
        case Anchor():
            raise AssertionError("anchors are resolved before an expression is written")


def _unambiguous(tree: Node) -> Node:
    """A single set between loops could come with each character: all of a vocabulary would be tried every time."""
    match tree:
        case Concat():
            items = list(map(_unambiguous, tree.items))
            for place in range(1, len(items)):
                if _is_loop(items[place - 1]):
                    rest = items[place + 1 : place + 2]
                    items[place] = _plainly_begun(items[place], into_loop=bool(rest) and _is_loop(rest[0]))
            return sequence(items)
        case Alternation():
            return Alternation(tuple(map(_unambiguous, tree.options)))
        case Repeat():
            return Repeat(_unambiguous(tree.item), tree.low, tree.high)
    return tree


def _is_loop(tree: Node) -> bool:
    return isinstance(tree, Repeat) and tree.high is None


def _plainly_begun(tree: Node, *, into_loop: bool) -> Node:
    """What stands behind a loop and leads into another one, without escapes before that."""
    if isinstance(tree, Chars) and into_loop and (plain := plain_part(tree.ranges)):
        return Chars(plain)
    if isinstance(tree, Repeat) and tree.low and _is_loop(tree) and isinstance(tree.item, Chars):
        plain = plain_part(tree.item.ranges)
        return sequence([Repeat(Chars(plain), tree.low, tree.low), Repeat(tree.item, 0, None)]) if plain else tree
    return tree


def _single(tree: Node) -> int:
    """Sets with escapes that do not begin a loop, repetitions counted."""
    match tree:
        case Chars():
            return int(has_escapes(tree.ranges))
        case Concat():
            return _sum(tree.items)
        case Alternation():
            return _sum(tree.options)
        case Repeat():
            if isinstance(tree.item, Chars):
                return tree.low * _single(tree.item)
            return max(tree.low, tree.high or 0) * _single(tree.item)
        case Anchor():
            raise AssertionError("anchors are resolved before an expression is written")


def _sum(items: Sequence[Node]) -> int:
    return sum(map(_single, items))


def _holds(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)
