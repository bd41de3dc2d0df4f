"""OpenTelemetry tracing: off unless the standard environment variables name an OTLP endpoint.

One request is one trace over gateway, decode and prefill. The context rides in our own messages
(`traceparent`), because stream interceptors would give one span per long-lived stream.
"""

import os
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_PROPAGATOR = TraceContextTextMapPropagator()
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def tracing_wanted() -> bool:
    """True if an OTLP endpoint is configured and nothing switches the SDK off."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporter_off = os.environ.get("OTEL_TRACES_EXPORTER", "").lower() == "none"
    return not disabled and not exporter_off and any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)


class Tracing:
    """The process's tracer provider; `close` flushes what is still to be exported."""

    def __init__(self, service: str, instance: str) -> None:
        """`service`: gateway, prefill or decode; `instance`: the worker's or gateway's id."""
        self._provider: TracerProvider | None = None
        if tracing_wanted():
            resource = Resource.create({"service.name": f"tandem-{service}", "service.instance.id": instance})
            self._provider = TracerProvider(resource=resource)
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def tracer(self) -> Tracer:
        provider = self._provider if self._provider is not None else trace.NoOpTracerProvider()
        return provider.get_tracer("tandem")

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


def traceparent_of(span: Span) -> str:
    """The W3C traceparent that makes `span` the parent on the other side; empty if it records nothing."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def context_from(traceparent: str) -> Context:
    """The context to start child spans in; an empty or malformed value starts a new trace."""
    return _PROPAGATOR.extract({"traceparent": traceparent})


def record_span(
    tracer: Tracer,
    name: str,
    parent: Context,
    seconds: float,
    *,
    ended_ago: float = 0.0,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> None:
    """Add a span that has already passed: it lasted `seconds` and ended `ended_ago` seconds before now."""
    end = time.time_ns() - int(ended_ago * 1e9)
    span = tracer.start_span(name, context=parent, start_time=end - int(seconds * 1e9), attributes=attributes)
    span.end(end_time=end)
