"""`properties`, `required`, `additionalProperties` and their like in schemas that hold together, as one object."""

from collections.abc import Mapping, Sequence

from gateway.structured.complaints import Complaints, Place
from gateway.structured.limits import MAX_REPEAT
from gateway.structured.regex.forms import JSON_RANGES, excluding, only
from gateway.structured.regex.tree import NOTHING, Chars, Concat, Node, Repeat, choice, literal
from gateway.structured.schema.alternatives import NodeId, Properties, Text, Values
from gateway.structured.schema.arrays import NodeOf
from gateway.structured.schema.branches import Branch, Branches, Member
from gateway.structured.schema.matching import Matching
from gateway.structured.schema.strings import Strings
from gateway.structured.schema.values import narrowed

_UNENFORCED = ("dependentRequired", "dependentSchemas", "dependencies")
#: Beginnings of declared names that others are told apart by: the compiler takes its time for each of them.
_MOST_PREFIXES = 32
#: Looking at what one schema says of a name takes as long as so many comparisons.
_MEMBER_COST = 10


class Objects:
    """Makes objects of branches."""

    def __init__(
        self, complaints: Complaints, branches: Branches, strings: Strings, matching: Matching, node_of: NodeOf
    ) -> None:
        self._complaints = complaints
        self._branches = branches
        self._strings = strings
        self._matching = matching
        self._node_of = node_of

    def object(self, branch: Branch) -> Properties | None:
        """None if no object is valid. Raises InvalidRequest if strict and not all can be enforced."""
        self._refuse_unenforced(branch)
        required = frozenset(name for member in branch for name in member.schema.get("required", ()))
        names = self._names(branch, required)
        names_form = self._names_form(branch)
        named = {name: self._named(branch, name) for name in names if self._allowed(names_form, name)}
        if not required <= named.keys():
            return None
        others = self._others(branch, names, names_form)
        low, high = self._bounds(branch)
        if high is not None and high < max(low, len(required)):
            return None
        low, others = self._countable(branch, low, required, named, others)
        return Properties(named, required, others, low, high, _sealed(branch, names))

    def _refuse_unenforced(self, branch: Branch) -> None:
        for member in branch:
            for keyword in _UNENFORCED:
                if member.schema.get(keyword):
                    self._complaints.unenforced((*member.place, keyword), f"`{keyword}`")

    def _names(self, branch: Branch, required: frozenset[str]) -> list[str]:
        """Declared ones in the order of their declaration, then those that are only required."""
        declared = [name for member in branch for name in member.schema.get("properties", ())]
        listed = [name for member in branch for name in member.schema.get("required", ())]
        return list(dict.fromkeys([*declared, *listed]))

    def _named(self, branch: Branch, name: str) -> NodeId:
        places: list[Place] = []
        self._matching.spend(_MEMBER_COST * len(branch))
        for member in branch:
            own = self._own_places(member, name)
            places.extend(own)
            if not own:
                places.extend(self._catch_all(branch, member, name))
        return self._node_of(places)

    def _own_places(self, member: Member, name: str) -> list[Place]:
        """What `properties` and `patternProperties` of one schema say of a name."""
        places: list[Place] = []
        if name in member.schema.get("properties", ()):
            places.append((*member.place, "properties", name))
        for pattern in member.schema.get("patternProperties", ()):
            place = (*member.place, "patternProperties", pattern)
            if self._pattern_fits(pattern, place, name):
                places.append(place)
        return places

    def _pattern_fits(self, pattern: str, place: Place, name: str) -> bool:
        form = self._strings.form(pattern, place)
        return form is None or self._matching.matches(form, name)

    def _catch_all(self, branch: Branch, member: Member, name: str | None) -> list[Place]:
        """What a schema says of names that it does not speak of otherwise."""
        if "additionalProperties" in member.schema:
            return [(*member.place, "additionalProperties")]
        if "unevaluatedProperties" not in member.schema:
            return []
        self._matching.spend(_MEMBER_COST * len(branch))
        parts = [part for part in branch if member.place in part.within]
        if any("additionalProperties" in part.schema for part in parts):
            return []
        if name is not None and any(self._own_places(part, name) for part in parts):
            return []
        return [(*member.place, "unevaluatedProperties")]

    def _names_form(self, branch: Branch) -> list[Text | Values] | None:
        """What `propertyNames` allows, as alternatives; None if everything."""
        places = [(*member.place, "propertyNames") for member in branch if "propertyNames" in member.schema]
        if not places:
            return None
        allowed: list[Text | Values] = []
        for part in self._branches.of(places):
            _refuse_not(part, self._complaints)
            text = self._strings.text(part)
            types = [member.schema["type"] for member in part if "type" in member.schema]
            if text is None or any("string" not in types_ for types_ in types):
                continue
            values = narrowed(part, [text], ["string"], self._complaints, self._matching)
            allowed.append(text if values is None else values)
        return allowed

    def _others(
        self, branch: Branch, names: Sequence[str], names_form: list[Text | Values] | None
    ) -> tuple[tuple[Node | None, NodeId], ...]:
        """Properties beyond the declared ones."""
        patterns = {
            pattern: (*member.place, "patternProperties", pattern)
            for member in branch
            for pattern in member.schema.get("patternProperties", ())
        }
        if patterns:
            if names_form is not None:
                return ()
            return self._patterned(branch, names, patterns)
        places = [place for member in branch for place in self._catch_all(branch, member, None)]
        if not places and any("properties" in member.schema for member in branch):
            return ()
        form = self._other_names(names, names_form)
        if form == NOTHING:
            return ()
        return ((form, self._node_of(places)),)

    def _patterned(
        self, branch: Branch, names: Sequence[str], patterns: Mapping[str, Place]
    ) -> tuple[tuple[Node | None, NodeId], ...]:
        """Names of the patterns that no declared name matches; where two may match, what both say must hold."""
        forms = {pattern: self._strings.form(pattern, place) for pattern, place in patterns.items()}
        others: list[tuple[Node | None, NodeId]] = []
        for pattern, form in forms.items():
            if form == NOTHING or any(self._pattern_fits(pattern, patterns[pattern], name) for name in names):
                continue
            together = [other for other in forms if other == pattern or not apart(form, forms[other])]
            places: list[Place] = []
            for member in branch:
                own = [other for other in together if other in member.schema.get("patternProperties", ())]
                places.extend((*member.place, "patternProperties", other) for other in own)
                if pattern not in own:
                    places.extend(self._catch_all(branch, member, None))
            if form is not None:
                form = only(form, JSON_RANGES)
            elif names:
                form = excluding(names, _MOST_PREFIXES)
            if form != NOTHING:
                others.append((form, self._node_of(places)))
        return tuple(others)

    def _allowed(self, names_form: list[Text | Values] | None, name: str) -> bool:
        if names_form is None:
            return True
        return any(
            name in form.values if isinstance(form, Values) else self._matching.fits(form, name) for form in names_form
        )

    def _other_names(self, names: Sequence[str], names_form: list[Text | Values] | None) -> Node | None:
        """The form of names that are not declared; None if any name is, NOTHING if none is."""
        if names_form is None:
            return excluding(names, _MOST_PREFIXES) if names else None
        return choice([form for entry in names_form if (form := self._name_form(entry, names)) != NOTHING])

    def _name_form(self, form: Text | Values, names: Sequence[str]) -> Node:
        if isinstance(form, Values):
            texts = [literal(value) for value in form.values if value not in names]
            return choice([text for text in texts if only(text, JSON_RANGES) != NOTHING])
        tree = form.form if form.form is not None else Repeat(Chars(JSON_RANGES), form.low, form.high)
        return NOTHING if any(self._matching.matches(tree, name) for name in names) else only(tree, JSON_RANGES)

    def _bounds(self, branch: Branch) -> tuple[int, int | None]:
        low = max((int(member.schema.get("minProperties", 0)) for member in branch), default=0)
        highs = [int(member.schema["maxProperties"]) for member in branch if "maxProperties" in member.schema]
        return low, min([*highs, MAX_REPEAT]) if highs else None

    def _countable(
        self,
        branch: Branch,
        low: int,
        required: frozenset[str],
        named: Mapping[str, NodeId],
        others: tuple[tuple[Node | None, NodeId], ...],
    ) -> tuple[int, tuple[tuple[Node | None, NodeId], ...]]:
        """Others could come twice and be counted twice: with a minimum above 1 none are allowed."""
        if low <= len(required):
            return 0, others
        if low <= 1 or not others:
            return low, others
        if low <= len(named):
            return low, ()
        place = next(member.place for member in branch if int(member.schema.get("minProperties", 0)) == low)
        self._complaints.unenforced((*place, "minProperties"), "`minProperties` above the number of named properties")
        return 1, others


def _refuse_not(branch: Branch, complaints: Complaints) -> None:
    for member in branch:
        for keyword in ("not", "if", "$dynamicRef", "$recursiveRef"):
            if keyword in member.schema:
                complaints.unenforced((*member.place, keyword), f"`{keyword}`")


def _sealed(branch: Branch, names: Sequence[str]) -> frozenset[str] | None:
    if any(member.schema.get("patternProperties") for member in branch):
        return None
    refusing = any(member.schema.get("additionalProperties") is False for member in branch)
    return frozenset(names) if refusing else None


def apart(first: Node | None, second: Node | None) -> bool:
    """Whether no text matches both, as far as their first characters tell."""
    if first is None or second is None:
        return False
    for one, other in zip(_beginning(first), _beginning(second), strict=False):
        if not any(low <= high2 and low2 <= high for low, high in one.ranges for low2, high2 in other.ranges):
            return True
    return False


def _beginning(tree: Node) -> list[Chars]:
    """Sets of the first characters, as far as they are single sets in a row."""
    found: list[Chars] = []
    for item in tree.items if isinstance(tree, Concat) else (tree,):
        if not isinstance(item, Chars):
            break
        found.append(item)
    return found
