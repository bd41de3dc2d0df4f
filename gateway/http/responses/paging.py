"""Pages of a list, as OpenAI cuts them: `limit`, `order` and `after`, the id of an item."""

from collections.abc import Mapping, Sequence

from common.errors import InvalidRequest
from gateway.http.formats import Json

_DEFAULT = 20
_MOST = 100


def page(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """The last item is the first, unless `order` is `asc`. Raises InvalidRequest naming the parameter."""
    ordered = list(items) if _order(query) == "asc" else list(reversed(items))
    start = _start(ordered, query.get("after"))
    limit = _limit(query.get("limit"))
    data = ordered[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(ordered),
    }


def _order(query: Mapping[str, str]) -> str:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    return order


def _start(ordered: Sequence[Json], after: str | None) -> int:
    if after is None:
        return 0
    for index, item in enumerate(ordered):
        if item["id"] == after:
            return index + 1
    raise InvalidRequest("after: there is no such item", field="after")


def _limit(limit: str | None) -> int:
    if limit is None:
        return _DEFAULT
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(_MOST)) and 1 <= int(limit) <= _MOST):
        raise InvalidRequest(f"limit must be a number from 1 to {_MOST}", field="limit")
    return int(limit)
