"""A collector of traces that keeps what it is sent: OTLP over gRPC, for tests."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class CollectedSpan:
    #: `service.name` of the process that sent it.
    service: str
    name: str
    trace_id: str
    span_id: str
    #: Empty for a root.
    parent_id: str
    #: Unix time in nanoseconds.
    start: int
    end: int
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._lock = threading.Lock()
        self.endpoint = ""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        spans = [
            _collected(_value(attribute.value), span)
            for resource_spans in request.resource_spans
            for attribute in resource_spans.resource.attributes
            if attribute.key == "service.name"
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]
        with self._lock:
            self._spans += spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        with self._lock:
            return [span for span in self._spans if span.trace_id == trace_id]

    @property
    def num_spans(self) -> int:
        with self._lock:
            return len(self._spans)


def _collected(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {attribute.key: _value(attribute.value) for attribute in span.attributes},
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(item) for item in found.values] if kind == "array_value" else found


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """Listens on a free port; `endpoint` is what OTEL_EXPORTER_OTLP_ENDPOINT wants."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
