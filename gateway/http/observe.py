"""ASGI middleware around every request: request id in and out, server span, metrics, the log line, and HEAD."""

from opentelemetry.trace import SpanKind, StatusCode, Tracer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.telemetry.tracing import context_from
from gateway.accounting import EdgeMetrics, RequestRecord, request_id

#: Probes and scrapes come every few seconds and say nothing about clients.
_UNOBSERVED = frozenset({"/health", "/ready", "/metrics", "/tandem/status"})
#: Metric labels; anything else becomes "other", so that clients cannot make new time series.
_ROUTES = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"}
)
_MODEL_PREFIX = "/v1/models/"
_RESPONSE_PREFIX = "/v1/responses/"


class ObserveRequests:
    """Puts `request_id` into `scope["state"]`, and a `RequestRecord` as `record`, finished with the response's status.

    Probes and preflights have no record.
    """

    def __init__(self, app: ASGIApp, metrics: EdgeMetrics, tracer: Tracer) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = _Answer(send, request_id(headers.get("x-request-id", "")))
        state = scope.setdefault("state", {})
        state["request_id"] = answer.request_id
        if scope["path"] in _UNOBSERVED or scope["method"] == "OPTIONS":
            await self._app(_as_get(scope), receive, answer.send)
            return
        record = RequestRecord(self._metrics, answer.request_id, _route(scope["path"]))
        state["record"] = record
        with self._tracer.start_as_current_span(
            f"{scope['method']} {record.route}",
            context=context_from(headers.get("traceparent", "")),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "tandem.client_request_id": record.request_id},
        ) as span:
            try:
                await self._app(_as_get(scope), receive, answer.send)
            finally:
                final = record.finish(str(answer.status))
                span.set_attribute("http.route", record.route)
                span.set_attribute("http.response.status_code", int(final))
                if int(final) >= 500:
                    span.set_status(StatusCode.ERROR)


class _Answer:
    """Sends one response with the request's id in its head; knows its status (500 until there is one)."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 500

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)


def _as_get(scope: Scope) -> Scope:
    """HEAD is a GET whose body the server, which has its own copy of the method, does not send."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _route(path: str) -> str:
    if path.startswith(_MODEL_PREFIX):
        return _MODEL_PREFIX + "{model}"
    if path.startswith(_RESPONSE_PREFIX):
        return _RESPONSE_PREFIX + "{id}"
    return path if path in _ROUTES else "other"
