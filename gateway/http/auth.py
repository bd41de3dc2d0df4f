"""ASGI middleware that asks for an API key before anything else of a request is looked at: its path, its body.

Which paths are open is decided by exact comparison with the path that routes are matched by, so that no other spelling
of a path (`//v1/models`, `/V1/models`, dot segments) comes around it: what is not named here needs the key.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import Unauthenticated
from gateway.accounting import RequestRecord
from gateway.http.errors import error_response
from gateway.tenants import ApiKeys, Tenant

#: For load balancers and Prometheus, which say nothing about clients; `/tandem/status` tells addresses of workers.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class RequireKey:
    """Answers 401, or notes the key's tenant in the request's record and, by name, in `scope["state"]["tenant"]`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                tenant = self._keys.tenant_of(_authorization(scope))
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
            _note(scope, tenant)
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    """Two of them are as good as a wrong one: a proxy may have looked at the other."""
    given = Headers(scope=scope).getlist("authorization")
    return ", ".join(given) if given else None


def _note(scope: Scope, tenant: Tenant) -> None:
    state = scope.setdefault("state", {})
    state["tenant"] = tenant.name
    record = state.get("record")
    if isinstance(record, RequestRecord):
        record.tenant = tenant
