"""From a client's JSON schema to one that workers enforce as it stands. Knows no other kind of output."""

import json
from typing import Any

from common.sampling import GrammarKind, GrammarSpec
from gateway.structured.complaints import Complaints
from gateway.structured.json_values import check_value
from gateway.structured.schema.disjoint import Disjointness
from gateway.structured.schema.document import Document
from gateway.structured.schema.emit import emit
from gateway.structured.schema.table import Table


def enforceable_schema(schema: Any, *, field: str, strict: bool) -> dict[str, Any]:
    """The schema in terms that the workers' compiler enforces exactly; whatever it lets pass is valid.

    Args:
        schema: a JSON value: an object, true or false.
        field: the request field that it came in, for complaints.
        strict: refuse what cannot be enforced; otherwise it is left out.

    Raises InvalidRequest, naming the field and the place in the schema.
    """
    complaints = Complaints(field, strict)
    check_value(schema, complaints)
    document = Document(schema, complaints)
    table = Table(document, complaints)
    root = table.node([()])
    table.make()
    _check_one_ofs(table, complaints)
    if not table.clear()[root]:
        raise complaints.wrong((), "no value is valid under this schema, or none that can be written")
    return emit(table.entries, root)


def schema_grammar(schema: Any, *, field: str, strict: bool) -> GrammarSpec:
    """`enforceable_schema` as a grammar. Raises InvalidRequest."""
    written = enforceable_schema(schema, field=field, strict=strict)
    source = json.dumps(written, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, source)


def _check_one_ofs(table: Table, complaints: Complaints) -> None:
    """Only branches that exclude each other are the same as those of an `anyOf`."""
    if not complaints.strict:
        return
    one_ofs = table.one_ofs()
    disjoint = Disjointness(table.entries, table.matching)
    for place, nodes in one_ofs.items():
        for index, first in enumerate(nodes):
            for other in range(index + 1, len(nodes)):
                if not disjoint.of(first, nodes[other]):
                    complaints.unenforced(
                        (*place, "oneOf"), f"`oneOf` whose branches {index} and {other} may both be valid"
                    )
