"""All places of a schema as alternatives: made one after the other, then cleared of the impossible."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.structured.complaints import Complaints, Place
from gateway.structured.limits import MAX_NODES
from gateway.structured.schema.alternatives import (
    Alternative,
    Anything,
    Constant,
    Items,
    NodeId,
    Properties,
    Values,
)
from gateway.structured.schema.arrays import array
from gateway.structured.schema.branches import SPEAKING, Branch, Branches
from gateway.structured.schema.document import Document
from gateway.structured.schema.keywords import KEYWORDS, TYPES
from gateway.structured.schema.matching import Matching
from gateway.structured.schema.numbers import number
from gateway.structured.schema.objects import Objects
from gateway.structured.schema.strings import Strings
from gateway.structured.schema.values import narrowed

#: What says which types are allowed.
_TYPING = ("type", "enum", "const")
_UNENFORCED = ("not", "if", "$dynamicRef", "$recursiveRef")


@dataclass(slots=True)
class Entry:
    """One place, or several whose schemas hold together."""

    places: tuple[Place, ...]
    alternatives: tuple[Alternative, ...] = ()
    #: The schema lets other types pass as well, of which it says nothing.
    types_implied: bool = False


class Table:
    """Entries by number."""

    def __init__(self, document: Document, complaints: Complaints) -> None:
        self._document = document
        self._complaints = complaints
        self._branches = Branches(document, complaints)
        self._strings = Strings(complaints)
        self.matching = Matching(complaints)
        self._objects = Objects(complaints, self._branches, self._strings, self.matching, self.node)
        self._numbers: dict[frozenset[Place], NodeId] = {}
        self._made = 0
        self.entries: list[Entry] = []

    def node(self, places: Sequence[Place]) -> NodeId:
        """The number of an entry; it is made by the next `make`. Raises InvalidRequest: too many of them."""
        behind = tuple(dict.fromkeys(map(self._branches.behind, places)))
        key = frozenset(behind)
        if key not in self._numbers:
            if len(self.entries) >= MAX_NODES:
                raise self._complaints.wrong((), f"has more than {MAX_NODES} different places")
            self._numbers[key] = len(self.entries)
            self.entries.append(Entry(behind))
        return self._numbers[key]

    def make(self) -> None:
        """Fill in all entries that were asked for, and those that these lead to."""
        while self._made < len(self.entries):
            entry = self.entries[self._made]
            made: list[Alternative] = []
            for branch in self._branches.of(entry.places):
                made.extend(self._alternatives(branch))
                entry.types_implied |= not any(keyword in member.schema for member in branch for keyword in _TYPING)
            entry.alternatives = tuple(dict.fromkeys(made)) if _hashable(made) else tuple(made)
            self._made += 1

    def one_ofs(self) -> dict[Place, list[NodeId]]:
        """For each `oneOf` met, its branches, each together with what stands beside it. Makes them."""
        nodes: dict[Place, list[NodeId]] = {}
        while fresh := [place for place in self._branches.one_ofs if place not in nodes]:
            for place in fresh:
                bare = self._branches.without_one_of(place)
                count = self._branches.one_ofs[place]
                nodes[place] = [self.node([bare, (*place, "oneOf", index)]) for index in range(count)]
            self.make()
        return nodes

    def clear(self) -> list[bool]:
        """Take out what no finite value fits; returns for each entry whether anything is left."""
        filled = [False] * len(self.entries)
        users: list[set[NodeId]] = [set() for _ in self.entries]
        for user, entry in enumerate(self.entries):
            for alternative in entry.alternatives:
                for child in children(alternative):
                    users[child].add(user)
        waiting = list(range(len(self.entries)))
        while waiting:
            current = waiting.pop()
            if not filled[current] and any(_possible(option, filled) for option in self.entries[current].alternatives):
                filled[current] = True
                waiting.extend(users[current])
        for entry in self.entries:
            entry.alternatives = tuple(
                _cleared(option, filled) for option in entry.alternatives if _possible(option, filled)
            )
        return filled

    def _alternatives(self, branch: Branch) -> list[Alternative]:
        for member in branch:
            for keyword in _UNENFORCED:
                if keyword in member.schema:
                    self._complaints.unenforced((*member.place, keyword), f"`{keyword}`")
        types = _types(branch)
        if types is None:
            return [Anything()]
        made = [option for type_ in types if (option := self._typed(branch, type_)) is not None]
        values = narrowed(branch, made, types, self._complaints, self.matching)
        if values is None:
            return made
        self._refuse_beside_values(branch, values)
        return [values] if values.values else []

    def _typed(self, branch: Branch, type_: str) -> Alternative | None:
        match type_:
            case "object":
                return self._objects.object(branch)
            case "array":
                return array(branch, self._complaints, self.node)
            case "string":
                return self._strings.text(branch)
            case "number" | "integer":
                return number(branch, self._complaints, whole=type_ == "integer")
        return Constant(type_)

    def _refuse_beside_values(self, branch: Branch, values: Values) -> None:
        """Listed objects and arrays are not compared with what else is said of objects and arrays."""
        for type_, name in ((dict, "object"), (list, "array")):
            if not any(isinstance(value, type_) for value in values.values):
                continue
            for member in branch:
                for keyword in member.schema:
                    if keyword in KEYWORDS and KEYWORDS[keyword].about == name:
                        self._complaints.unenforced((*member.place, keyword), f"`{keyword}` beside listed {name}s")


def children(alternative: Alternative) -> list[NodeId]:
    match alternative:
        case Items():
            return [*alternative.first, *([] if alternative.rest is None else [alternative.rest])]
        case Properties():
            return [*alternative.named.values(), *(node for _, node in alternative.others)]
    return []


def _types(branch: Branch) -> list[str] | None:
    """Types that are allowed, in the order in which they are listed first; None if nothing is said at all."""
    allowed: list[str] | None = None
    for member in branch:
        if "type" in member.schema:
            listed = member.schema["type"]
            own = [listed] if isinstance(listed, str) else list(listed)
            allowed = own if allowed is None else _both(allowed, own)
    if allowed is not None:
        return [type_ for type_ in allowed if not (type_ == "integer" and "number" in allowed)]
    spoken_of = {KEYWORDS[keyword].about for member in branch for keyword in member.schema if keyword in SPEAKING}
    if any("enum" in member.schema or "const" in member.schema for member in branch):
        return [type_ for type_ in TYPES if type_ != "integer"]
    about = [type_ for type_ in TYPES if type_ in spoken_of]
    return about or None


def _both(first: Sequence[str], second: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for type_ in first:
        if type_ in second or (type_ == "integer" and "number" in second):
            kept.append(type_)
        elif type_ == "number" and "integer" in second:
            kept.append("integer")
    return kept


def _possible(alternative: Alternative, filled: Sequence[bool]) -> bool:
    match alternative:
        case Items():
            needed = [*alternative.first, *([] if alternative.rest is None else [alternative.rest])]
            count = sum(1 for _ in _leading(alternative.first, filled))
            if count < len(alternative.first):
                return alternative.low <= count
            return alternative.low <= count or (alternative.rest is not None and filled[needed[-1]])
        case Properties():
            if not all(filled[alternative.named[name]] for name in alternative.required):
                return False
            available = sum(filled[node] for node in alternative.named.values())
            return alternative.low <= available or any(filled[node] for _, node in alternative.others)
    return True


def _leading(nodes: Sequence[NodeId], filled: Sequence[bool]) -> list[NodeId]:
    """Those before the first that nothing fits."""
    for index, node in enumerate(nodes):
        if not filled[node]:
            return list(nodes[:index])
    return list(nodes)


def _cleared(alternative: Alternative, filled: Sequence[bool]) -> Alternative:
    match alternative:
        case Items():
            first = tuple(_leading(alternative.first, filled))
            cut = len(first) < len(alternative.first)
            rest = None if cut or alternative.rest is None or not filled[alternative.rest] else alternative.rest
            return replace(alternative, first=first, rest=rest)
        case Properties():
            named = {name: node for name, node in alternative.named.items() if filled[node]}
            return replace(
                alternative, named=named, others=tuple(entry for entry in alternative.others if filled[entry[1]])
            )
    return alternative


def _hashable(made: Sequence[Alternative]) -> bool:
    return not any(isinstance(option, Values | Properties) for option in made)
