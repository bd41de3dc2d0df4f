"""`items`, `prefixItems` and their like in schemas that hold together, as one array."""

from collections.abc import Callable, Sequence

from gateway.structured.complaints import Complaints, Place
from gateway.structured.limits import MAX_REPEAT
from gateway.structured.schema.alternatives import Items, NodeId
from gateway.structured.schema.branches import Branch, Member

#: The node of all schemas at these places together.
NodeOf = Callable[[Sequence[Place]], NodeId]


def array(branch: Branch, complaints: Complaints, node_of: NodeOf) -> Items | None:
    """None if no array is valid. Raises InvalidRequest if strict and not all can be enforced."""
    low, high = _bounds(branch, complaints)
    if high is not None and low > high:
        return None
    _refuse_unenforced(branch, complaints, at_most_one=high is not None and high <= 1)
    length = max(_named(member) for member in branch)
    if high is not None:
        length = min(length, high)
    first = tuple(
        node_of([place for member in branch if (place := _place(branch, member, index)) is not None])
        for index in range(length)
    )
    rest = [place for member in branch if (place := _place(branch, member, None)) is not None]
    is_open = bool(rest) or length == 0 or low > length
    return Items(first, node_of(rest) if is_open else None, low, high)


def _bounds(branch: Branch, complaints: Complaints) -> tuple[int, int | None]:
    low = max((int(member.schema.get("minItems", 0)) for member in branch), default=0)
    highs = [int(member.schema["maxItems"]) for member in branch if "maxItems" in member.schema]
    if low > MAX_REPEAT:
        place = next(member.place for member in branch if member.schema.get("minItems", 0) > MAX_REPEAT)
        complaints.unenforced((*place, "minItems"), f"`minItems` above {MAX_REPEAT}")
        low = 0
    return low, min([*highs, MAX_REPEAT]) if highs else None


def _refuse_unenforced(branch: Branch, complaints: Complaints, *, at_most_one: bool) -> None:
    for member in branch:
        if "contains" in member.schema:
            complaints.unenforced((*member.place, "contains"), "`contains`")
        if member.schema.get("uniqueItems") and not at_most_one:
            complaints.unenforced((*member.place, "uniqueItems"), "`uniqueItems`")


def _named(member: Member) -> int:
    return len(member.schema.get("prefixItems", ()))


def _place(branch: Branch, member: Member, index: int | None) -> Place | None:
    """What a member says of the item at `index`, or of those behind all that are named; None if nothing."""
    named = _named(member)
    if index is not None and index < named:
        return (*member.place, "prefixItems", index)
    if "items" in member.schema:
        return (*member.place, "items")
    if "unevaluatedItems" in member.schema:
        parts = [part for part in branch if member.place in part.within]
        evaluated = max(map(_named, parts))
        if not any("items" in part.schema for part in parts) and (index is None or index >= evaluated):
            return (*member.place, "unevaluatedItems")
    return None
