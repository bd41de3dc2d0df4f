"""How a schema is complained about: which request field, where in it, and what is let pass when it is not strict."""

from dataclasses import dataclass

from common.errors import InvalidRequest

#: A place in a JSON document: keys and indexes, outermost first.
Place = tuple[str | int, ...]


def pointer(place: Place) -> str:
    """RFC 6901; "" is the whole document."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in place)


@dataclass(frozen=True, slots=True)
class Complaints:
    """Makes the errors of one request field."""

    field: str
    #: What cannot be enforced is refused; otherwise it is left out.
    strict: bool

    def wrong(self, place: Place, words: str) -> InvalidRequest:
        """To raise for what is wrong in any mode."""
        where = f"{pointer(place)}: " if place else ""
        return InvalidRequest(f"{self.field}: {where}{words}", field=self.field)

    def unenforced(self, place: Place, words: str) -> None:
        """A feature that no grammar is made of. Raises InvalidRequest if strict."""
        if self.strict:
            raise self.wrong(place, f"{words} cannot be enforced; leave it out, or do not ask for strict")
