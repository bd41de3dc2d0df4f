"""`pattern`, `format`, `minLength` and `maxLength` of schemas that hold together, as one form of strings."""

from collections.abc import Mapping
from typing import Any

from gateway.structured.complaints import Complaints, Place
from gateway.structured.limits import MAX_REGEX_POSITIONS, MAX_REPEAT
from gateway.structured.regex.forms import only, positions, search, with_lengths
from gateway.structured.regex.parse import RegexError, parse_regex
from gateway.structured.regex.tree import ANY_RANGES, ANYTHING, NOTHING, Node
from gateway.structured.schema.alternatives import Text
from gateway.structured.schema.branches import Branch
from gateway.structured.schema.formats import APPROXIMATE, format_tree


class Strings:
    """Keeps the expressions that it has read."""

    def __init__(self, complaints: Complaints) -> None:
        self._complaints = complaints
        self._read: dict[str, Node | None] = {}
        self._formats: dict[str, Node | None] = {}

    def text(self, branch: Branch) -> Text | None:
        """None if no string is valid. Raises InvalidRequest if strict and not all can be enforced."""
        low, high = _length_bounds(branch)
        if low > MAX_REPEAT:
            place = next(member.place for member in branch if member.schema.get("minLength", 0) > MAX_REPEAT)
            self._complaints.unenforced((*place, "minLength"), f"`minLength` above {MAX_REPEAT}")
            low = 0
        high = None if high is None else min(high, MAX_REPEAT)
        if high is not None and high < low:
            return None
        form = self._form(branch)
        if form == NOTHING:
            return None
        if form is None or (low == 0 and high is None):
            return Text(form, low, high)
        bounded = with_lengths(form, low, high)
        if bounded is None:
            self._complaints.unenforced(_length_place(branch), f"a length of {_span(low, high)} beside this form")
            bounded = form
        return None if bounded == NOTHING else Text(bounded)

    def form(self, pattern: str, place: Place) -> Node | None:
        """Strings in which `pattern` is found; None if it cannot be enforced, or if it is found in every string.

        Raises InvalidRequest if strict and it cannot, or if it is not a regular expression at all.
        """
        if pattern not in self._read:
            self._read[pattern] = self._parsed(pattern, place)
        return self._read[pattern]

    def _parsed(self, pattern: str, place: Place) -> Node | None:
        try:
            tree = search(parse_regex(pattern))
        except RegexError as error:
            self._complaints.unenforced(place, f"{error}: this pattern")
            return None
        if positions(tree) > MAX_REGEX_POSITIONS:
            raise self._complaints.wrong(place, f"has more than {MAX_REGEX_POSITIONS} characters, repetitions counted")
        if tree == ANYTHING:
            return None
        # A set without characters (`[^\s\S]`) would be written as nothing at all, which matches the empty text.
        return only(tree, ANY_RANGES)

    def _format(self, name: str) -> Node | None:
        if name not in self._formats:
            self._formats[name] = format_tree(name)
        return self._formats[name]

    def _form(self, branch: Branch) -> Node | None:
        """Of all patterns and formats one; None if there is none."""
        found: Node | None = None
        for member in branch:
            for keyword in ("pattern", "format"):
                form = self._member_form(member.schema, keyword, (*member.place, keyword))
                if form is None or form == found:
                    continue
                if found is not None:
                    self._complaints.unenforced((*member.place, keyword), "more than one pattern or format of a string")
                    continue
                found = form
        return found

    def _member_form(self, schema: Mapping[str, Any], keyword: str, place: Place) -> Node | None:
        if keyword not in schema:
            return None
        if keyword == "pattern":
            return self.form(schema[keyword], place)
        form = self._format(schema[keyword])
        if form is None or schema[keyword] in APPROXIMATE:
            self._complaints.unenforced(place, f"`format` {schema[keyword]!r:.60}")
        return form


def _length_bounds(branch: Branch) -> tuple[int, int | None]:
    lows = [int(member.schema["minLength"]) for member in branch if "minLength" in member.schema]
    highs = [int(member.schema["maxLength"]) for member in branch if "maxLength" in member.schema]
    return max(lows, default=0), min(highs, default=None)


def _length_place(branch: Branch) -> Place:
    return next(
        (*member.place, keyword)
        for member in branch
        for keyword in ("minLength", "maxLength")
        if keyword in member.schema
    )


def _span(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"{low} to {high}"
