"""What is done with the tree of a regular expression: anchors resolved, characters left out, lengths."""

from collections.abc import Iterable, Sequence

from gateway.structured.regex.parse import RegexError
from gateway.structured.regex.tree import (
    ANYTHING,
    EMPTY,
    NOTHING,
    Alternation,
    Anchor,
    Chars,
    Concat,
    Node,
    Ranges,
    Repeat,
    char,
    choice,
    complement,
    intersection,
    sequence,
    union,
)

#: Characters that stand for themselves in a JSON string.
JSON_RANGES = complement(union([(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))


def full_match(tree: Node) -> Node:
    """The same as an expression that the whole text must match, where anchors say no more than that."""
    return _resolved(tree, EMPTY, left=True, right=True)


def search(tree: Node) -> Node:
    """As an expression that the whole text must match, when `tree` need only be found in it."""
    return _resolved(tree, ANYTHING, left=True, right=True)


def only(tree: Node, ranges: Ranges) -> Node:
    """What of it can be matched by text of these characters; NOTHING if no text can."""
    match tree:
        case Chars():
            shared = intersection(tree.ranges, ranges)
            return Chars(shared) if shared else NOTHING
        case Concat():
            return sequence([only(item, ranges) for item in tree.items])
        case Alternation():
            return choice([kept for option in tree.options if (kept := only(option, ranges)) != NOTHING])
        case Repeat():
            kept_item = only(tree.item, ranges)
            if kept_item == NOTHING:
                return EMPTY if tree.low == 0 else NOTHING
            return Repeat(kept_item, tree.low, tree.high)
        case Anchor():
            return tree


def lengths(tree: Node) -> tuple[int, int | None]:
    """Fewest and most characters of what it matches; None is without end."""
    match tree:
        case Chars():
            return 1, 1
        case Concat():
            spans = [lengths(item) for item in tree.items]
            return sum(low for low, _ in spans), _sum([high for _, high in spans])
        case Alternation():
            spans = [lengths(option) for option in tree.options] or [(0, 0)]
            highs = [high for _, high in spans]
            return min(low for low, _ in spans), None if None in highs else max(high or 0 for high in highs)
        case Repeat():
            low, high = lengths(tree.item)
            if high == 0:
                return 0, 0
            return low * tree.low, None if high is None or tree.high is None else high * tree.high
        case Anchor():
            return 0, 0


def positions(tree: Node) -> int:
    """Characters that it has once its counted repetitions are written out: a measure of its cost."""
    match tree:
        case Chars():
            return 1
        case Concat():
            return sum(map(positions, tree.items))
        case Alternation():
            return sum(map(positions, tree.options))
        case Repeat():
            return positions(tree.item) * max(tree.low, tree.high or 0, 1)
        case Anchor():
            return 0


def with_lengths(tree: Node, low: int, high: int | None) -> Node | None:
    """What of it has `low` to `high` characters; None if that cannot be said as an expression of moderate size."""
    shortest, longest = lengths(tree)
    if shortest >= low and (high is None or (longest is not None and longest <= high)):
        return tree
    items: list[Node] = list(tree.items) if isinstance(tree, Concat) else [tree]
    loose = [index for index, item in enumerate(items) if lengths(item)[0] != lengths(item)[1]]
    if len(loose) != 1:
        return None
    item = items[loose[0]]
    if not isinstance(item, Repeat) or lengths(item.item) != (1, 1):
        return None
    fixed = shortest - item.low
    least = max(item.low, low - fixed)
    bounds = [bound for bound in (item.high, None if high is None else high - fixed) if bound is not None]
    most = min(bounds, default=None)
    if most is not None and most < least:
        return NOTHING
    items[loose[0]] = EMPTY if most == 0 else Repeat(item.item, least, most)
    return sequence(items)


def excluding(names: Iterable[str], most_prefixes: int) -> Node:
    """Texts of JSON's plain characters that are none of `names`, nor begin with as much of one as is looked at.

    Args:
        most_prefixes: how many different beginnings of names are told apart; as many first characters as there are
            in any case. The compiler takes its time for each.
    """
    different = sorted(set(names))
    depth = 1
    while depth < max(map(len, different), default=0) and _prefixes(different, depth + 1) <= most_prefixes:
        depth += 1
    return only(_excluding(different, 0, depth), JSON_RANGES)


def _prefixes(names: Sequence[str], depth: int) -> int:
    return len({name[:length] for name in names for length in range(1, min(depth, len(name)) + 1)})


def _excluding(names: Sequence[str], begin: int, depth: int) -> Node:
    """What may follow the first `begin` characters, which the names share; nothing behind `depth` of a longer one."""
    following: dict[str, list[str]] = {}
    for name in names:
        if len(name) > begin:
            following.setdefault(name[begin], []).append(name)
    taken = union((ord(character), ord(character)) for character in following)
    options = [sequence([Chars(complement(taken)), Repeat(Chars(JSON_RANGES), 0, None)])]
    if all(len(name) > begin for name in names):
        options.append(EMPTY)
    for character, members in following.items():
        if begin + 1 < depth or max(map(len, members)) <= depth:
            options.append(sequence([char(character), _excluding(members, begin + 1, depth)]))
    return choice(options)


def _resolved(tree: Node, outside: Node, *, left: bool, right: bool) -> Node:
    """`left`, `right`: whether the tree stands at the beginning or end of the text."""
    if isinstance(tree, Alternation):
        return choice([_resolved(option, outside, left=left, right=right) for option in tree.options])
    items = list(tree.items) if isinstance(tree, Concat) else [tree]
    begins, ends = 0, len(items)
    while left and begins < ends and items[begins] == Anchor(end=False):
        begins += 1
    while right and begins < ends and items[ends - 1] == Anchor(end=True):
        ends -= 1
    inner, before, after = items[begins:ends], [], []
    open_left, open_right = left and begins == 0, right and ends == len(items)
    anchored_first = bool(inner) and _has_anchor(inner[0])
    anchored_last = bool(inner) and _has_anchor(inner[-1])
    if open_left and not anchored_first:
        before = [outside]
    if open_right and not anchored_last and (inner or not before):
        after = [outside]
    if len(inner) == 1 and anchored_first and isinstance(inner[0], Alternation):
        inner = [_resolved(inner[0], outside, left=open_left, right=open_right)]
    elif inner:
        if anchored_first and isinstance(inner[0], Alternation) and open_left:
            inner[0] = _resolved(inner[0], outside, left=True, right=False)
        if anchored_last and isinstance(inner[-1], Alternation) and open_right:
            inner[-1] = _resolved(inner[-1], outside, left=False, right=True)
    if any(map(_has_anchor, inner)):
        raise RegexError("an anchor (^ or $) in the middle is not supported")
    return sequence([*before, *inner, *after])


def _has_anchor(tree: Node) -> bool:
    match tree:
        case Anchor():
            return True
        case Concat():
            return any(map(_has_anchor, tree.items))
        case Alternation():
            return any(map(_has_anchor, tree.options))
        case Repeat():
            return _has_anchor(tree.item)
    return False


def _sum(values: list[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
