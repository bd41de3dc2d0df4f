"""Older drafts of JSON schema in the words of 2020-12. Changes one schema at a time and knows no document."""

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Dialect(Enum):
    """Drafts by the URI that `$schema` names, without scheme and fragment."""

    DRAFT4 = "json-schema.org/draft-04/schema"
    DRAFT6 = "json-schema.org/draft-06/schema"
    DRAFT7 = "json-schema.org/draft-07/schema"
    DRAFT2019 = "json-schema.org/draft/2019-09/schema"
    DRAFT2020 = "json-schema.org/draft/2020-12/schema"


def dialect_of(uri: str) -> Dialect | None:
    """None if it is not known."""
    bare = uri.partition("://")[2].partition("#")[0]
    return next((dialect for dialect in Dialect if dialect.value == bare), None)


def modern(schema: Mapping[str, Any], dialect: Dialect) -> Mapping[str, Any]:
    """The same schema as 2020-12 says it. Subschemas stay as they are."""
    if dialect is Dialect.DRAFT2020:
        return schema
    changed = dict(schema)
    if dialect is not Dialect.DRAFT2019 and "$ref" in schema:
        return {"$ref": schema["$ref"]}
    if isinstance(schema.get("items"), list):
        changed["prefixItems"] = changed.pop("items")
        if "additionalItems" in changed:
            changed["items"] = changed["additionalItems"]
        if not changed["prefixItems"]:
            del changed["prefixItems"]
    changed.pop("additionalItems", None)
    if dialect is Dialect.DRAFT4:
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if changed.pop(exclusive, None) is True and bound in changed:
                changed[exclusive] = changed.pop(bound)
    return changed
