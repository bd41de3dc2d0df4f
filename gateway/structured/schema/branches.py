"""What must hold at one place: references and `allOf` followed, `anyOf` and `oneOf` multiplied out into branches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.structured.complaints import Complaints, Place
from gateway.structured.limits import MAX_ALTERNATIVES, MAX_CHAIN, MAX_STEPS
from gateway.structured.schema.document import Document
from gateway.structured.schema.keywords import KEYWORDS, Support

#: Keywords that say something about what is valid.
SPEAKING = frozenset(keyword for keyword, entry in KEYWORDS.items() if entry.support is not Support.ANNOTATION)


@dataclass(frozen=True, slots=True)
class Member:
    """One schema of those that hold together."""

    place: Place
    schema: Mapping[str, Any]
    #: The places of the schemas that it is part of (by `allOf`, `anyOf`, `$ref`), its own included.
    within: frozenset[Place]


Branch = tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """A branch in the making; `pending` is a stack of places with the places around them."""

    pending: tuple[tuple[Place, frozenset[Place]], ...]
    members: Branch = ()


class Branches:
    """Takes places of a document apart."""

    def __init__(self, document: Document, complaints: Complaints) -> None:
        self._document = document
        self._complaints = complaints
        self._steps = 0
        #: Places of schemas without their `oneOf`, and those of the schemas.
        self._bare: dict[Place, Place] = {}
        #: Every `oneOf` met: the schema's place and how many branches it has.
        self.one_ofs: dict[Place, int] = {}

    def of(self, places: Sequence[Place]) -> list[Branch]:
        """Branches, any one of which must be met; none if nothing can be valid.

        Raises InvalidRequest for a schema that refers to itself with nothing between, or that is too complex.
        """
        done: list[Branch] = []
        states = [_State(tuple((place, frozenset()) for place in reversed(places)))]
        while states:
            state = states.pop()
            if not state.pending:
                done.append(state.members)
            else:
                states.extend(reversed(self._step(state)))
            if len(done) + len(states) > MAX_ALTERNATIVES:
                raise self._complaints.wrong(places[0], f"has more than {MAX_ALTERNATIVES} alternatives")
        return done

    def behind(self, place: Place) -> Place:
        """Where a schema leads that is nothing but a reference; else `place`."""
        seen = {place}
        while True:
            schema = self._document.schema(place)
            if isinstance(schema, bool) or "$ref" not in schema or not _only_reference(schema):
                return place
            place = self._document.target(place, schema["$ref"])
            if place in seen:
                raise self._complaints.wrong(place, "refers to itself, with nothing between")
            seen.add(place)

    def without_one_of(self, place: Place) -> Place:
        """A place that stands for the schema at `place` without its `oneOf`."""
        bare = (*place, "oneOf", "-")
        self._bare[bare] = place
        self._document.add(bare, self._document.schema(place))
        return bare

    def _step(self, state: _State) -> list[_State]:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise self._complaints.wrong((), "is too complex")
        (place, around), rest = state.pending[-1], state.pending[:-1]
        if place in around:
            raise self._complaints.wrong(place, "refers to itself, with nothing between")
        if len(around) >= MAX_CHAIN:
            raise self._complaints.wrong(place, f"is more than {MAX_CHAIN} references deep, with nothing between")
        schema = self._document.schema(place)
        if place in self._bare and not isinstance(schema, bool):
            place = self._bare[place]
            schema = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        if schema is False:
            return []
        if schema is True or any(member.place == place for member in state.members):
            return [_State(rest, state.members)]
        within = around | {place}
        members = (*state.members, Member(place, schema, within))
        forced = [(*place, "allOf", index) for index in range(len(schema.get("allOf", ())))]
        if "$ref" in schema:
            forced.append(self._document.target(place, schema["$ref"]))
        pending = (*rest, *((child, within) for child in reversed(forced)))
        states = [_State(pending, members)]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                states = self._forked(states, place, keyword, len(schema[keyword]), within)
        return states

    def _forked(
        self, states: list[_State], place: Place, keyword: str, count: int, within: frozenset[Place]
    ) -> list[_State]:
        if keyword == "oneOf" and count > 1:
            self.one_ofs[place] = count
        if len(states) * count > MAX_ALTERNATIVES:
            raise self._complaints.wrong((*place, keyword), f"makes more than {MAX_ALTERNATIVES} alternatives")
        return [
            _State((*state.pending, ((*place, keyword, index), within)), state.members)
            for state in states
            for index in range(count)
        ]


def _only_reference(schema: Mapping[str, Any]) -> bool:
    """Nothing that stands beside the reference says anything."""
    return not any(keyword in SPEAKING and keyword != "$ref" for keyword in schema)
