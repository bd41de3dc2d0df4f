"""ASGI middleware around every request: request id in and out, server span, metrics and the log line."""

from opentelemetry.trace import SpanKind, StatusCode, Tracer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.telemetry.tracing import context_from
from gateway.accounting import EdgeMetrics, RequestRecord, request_id

#: Probes and scrapes come every few seconds and say nothing about clients.
_UNOBSERVED = frozenset({"/health", "/ready", "/metrics", "/tandem/status"})
#: Metric labels; anything else becomes "other", so that clients cannot make new time series.
_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models"})
_MODEL_PREFIX = "/v1/models/"


class ObserveRequests:
    """Puts a `RequestRecord` into `scope["state"]["record"]` and finishes it with the response's status."""

    def __init__(self, app: ASGIApp, metrics: EdgeMetrics, tracer: Tracer) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNOBSERVED:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(self._metrics, request_id(headers.get("x-request-id", "")), _route(scope["path"]))
        scope.setdefault("state", {})["record"] = record
        status = 500

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        with self._tracer.start_as_current_span(
            f"{scope['method']} {record.route}",
            context=context_from(headers.get("traceparent", "")),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "tandem.client_request_id": record.request_id},
        ) as span:
            try:
                await self._app(scope, receive, observed_send)
            finally:
                final = record.finish(str(status))
                span.set_attribute("http.route", record.route)
                span.set_attribute("http.response.status_code", int(final))
                if int(final) >= 500:
                    span.set_status(StatusCode.ERROR)


def _route(path: str) -> str:
    if path.startswith(_MODEL_PREFIX):
        return _MODEL_PREFIX + "{model}"
    return path if path in _ROUTES else "other"
