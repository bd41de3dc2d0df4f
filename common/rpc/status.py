"""The gRPC edge's table: typed errors to statuses, applied in one interceptor for every servicer."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from common.errors import TandemError

_log = logging.getLogger(__name__)

#: Trailing metadata keys that carry what a status message cannot.
FIELD_KEY = "tandem-field"
CODE_KEY = "tandem-code"
RETRY_AFTER_KEY = "tandem-retry-after"
#: Characters of a message. It travels as a header, up to 12 bytes a character; clients refuse headers above 8 KiB.
_LONGEST_MESSAGE = 500

Context = grpc.aio.ServicerContext[Any, Any]


def status_code(error: TandemError) -> grpc.StatusCode:
    return grpc.StatusCode[error.status]


def error_metadata(error: TandemError) -> tuple[tuple[str, str], ...]:
    """Field, code and retry time as trailing metadata."""
    pairs = (
        (FIELD_KEY, error.field),
        (CODE_KEY, error.code),
        (RETRY_AFTER_KEY, None if error.retry_after is None else f"{error.retry_after:.3f}"),
    )
    return tuple((key, value) for key, value in pairs if value is not None)


async def abort_with(context: Context, error: TandemError) -> None:
    """End the call with the status of `error`."""
    await context.abort(status_code(error), error.message[:_LONGEST_MESSAGE], error_metadata(error))


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Turns a TandemError raised by a handler into its status; logs anything else and answers INTERNAL.

    Streaming handlers must be async generators.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        # An unknown method has no handler; health and reflection have their own ways with errors.
        if handler is None or method.startswith("/grpc."):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary, method), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, method), handler.request_deserializer, handler.response_serializer
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                _guard_stream(handler.stream_stream, method), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _guard_unary(
    call: Callable[[Any, Context], Awaitable[Any]], method: str
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await call(request, context)
        except TandemError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            await _abort_unexpected(context, method)

    return guarded


def _guard_stream(
    call: Callable[[Any, Context], AsyncIterator[Any]], method: str
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        replies = call(request, context)
        try:
            async for reply in replies:
                yield reply
        except TandemError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            await _abort_unexpected(context, method)
        finally:
            # The handler's own `finally` must run now, not when the garbage collector comes by.
            await replies.aclose()  # type: ignore[attr-defined]

    return guarded


async def _abort_unexpected(context: Context, method: str) -> None:
    _log.exception("unexpected error in %s", method)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error")
