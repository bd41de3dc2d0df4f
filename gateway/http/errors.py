"""The one table from errors to HTTP, and the one shape of an error body. Handlers just raise.

A body is `{"error": {"message", "type", "param", "code"}}` on every path. In a stream that has begun the same object
comes as a last `data:` event, and no `[DONE]` follows: the answer is not complete.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import PayloadTooLarge, TandemError

LOG = logging.getLogger("tandem.gateway.http")

#: The status nginx uses when the client left; nobody reads it but metrics and logs.
CLIENT_CLOSED_REQUEST = 499

_HTTP_STATUS: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": CLIENT_CLOSED_REQUEST,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_ERROR_TYPE: Mapping[int, str] = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ROUTING_CODE: Mapping[int, str] = {404: "unknown_url", 405: "method_not_allowed", 408: "timeout"}
_INTERNAL_MESSAGE = "internal error; the server's log has it under this request's id"


def http_status(error: Exception) -> int:
    """HTTP status of an error; 500 for whatever is not one of ours."""
    if isinstance(error, PayloadTooLarge):
        return 413
    if isinstance(error, TandemError):
        return _HTTP_STATUS.get(error.status, 500)
    return 500


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's error object; says nothing about errors that are not ours."""
    if isinstance(error, TandemError):
        return _body(http_status(error), error.message, param=error.field, code=error.code)
    return _body(500, _INTERNAL_MESSAGE, code="internal_error")


def error_response(error: Exception) -> JSONResponse:
    return JSONResponse(error_body(error), status_code=http_status(error), headers=_headers(error))


def install_error_handlers(app: FastAPI) -> None:
    """What is not ours, a bug, is for `AnswerBugs`."""
    app.add_exception_handler(TandemError, _on_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


class AnswerBugs:
    """ASGI middleware: what no handler expected is logged and answered as a 500.

    The framework's own way would answer outside of every other middleware, without request id and CORS headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting_send(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            LOG.exception("request %s failed", scope.get("state", {}).get("request_id", ""))
            await error_response(error)(scope, receive, send)


def _body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    type_ = _ERROR_TYPE.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _headers(error: Exception) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least one, wherever trying again makes sense; how to authenticate."""
    status = http_status(error)
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if status not in (429, 503) or not isinstance(error, TandemError):
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after or 1)))}


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _on_routing_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown path, wrong method, and what else the framework refuses."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    body = _body(error.status_code, message, code=_ROUTING_CODE.get(error.status_code))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_validation_error(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(_body(400, str(error)), status_code=400)
