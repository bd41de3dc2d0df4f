"""Asks for an API key before any gRPC call but health checks; metadata `authorization: Bearer KEY`."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from common.errors import Unauthenticated
from common.rpc.status import abort_with
from gateway.tenants import ApiKeys, Tenant

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]]

#: For load balancers; says nothing about clients.
_OPEN_PREFIX = "/grpc.health.v1.Health/"


def tenant_of(keys: ApiKeys, metadata: Metadata | None) -> Tenant:
    """The tenant whose key came with a call. Raises Unauthenticated."""
    given = [value for key, value in metadata or () if key == "authorization"]
    # Two of them are as good as a wrong one.
    return keys.tenant_of(", ".join(map(str, given)) if given else None)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Ends calls without a valid key as UNAUTHENTICATED, those of unknown methods and reflection too."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if not handler_call_details.method.startswith(_OPEN_PREFIX):
            try:
                tenant_of(self._keys, handler_call_details.invocation_metadata)
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: Unauthenticated) -> Any:
    """A handler that fits every kind of call, because it reads no message."""

    async def refuse(_requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        await abort_with(context, error)
        yield b""  # never reached: makes it a generator, as the handler of a stream must be

    return grpc.stream_stream_rpc_method_handler(refuse)
