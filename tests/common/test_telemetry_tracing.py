"""Spans that join over processes, and spans told of afterwards."""

import time
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from common.telemetry.tracing import Tracing, context_from, record_span, traceparent_of, tracing_wanted

_VARIABLES = (
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


class Recorder:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("test")
        self.shutdown = provider.shutdown

    def span(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self._exporter.get_finished_spans() if span.name == name]
        return found


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.shutdown()


def test_a_traceparent_makes_a_child_on_the_other_side(recorder: Recorder) -> None:
    with recorder.tracer.start_as_current_span("request") as span:
        traceparent = traceparent_of(span)
    record_span(recorder.tracer, "prefill", context_from(traceparent), 0.5)
    parent, child = recorder.span("request"), recorder.span("prefill")
    assert child.context.trace_id == parent.context.trace_id
    assert child.parent is not None and child.parent.span_id == parent.context.span_id
    assert child.parent.is_remote


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-zz-yy-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_without_a_good_traceparent_a_new_trace_begins(recorder: Recorder, traceparent: str) -> None:
    record_span(recorder.tracer, "prefill", context_from(traceparent), 0.5)
    assert recorder.span("prefill").parent is None


def test_a_span_that_records_nothing_has_no_traceparent() -> None:
    assert traceparent_of(trace.INVALID_SPAN) == ""


@pytest.mark.parametrize(("seconds", "ended_ago"), [(0.5, 0.0), (2.0, 3.0), (0.0, 0.0)])
def test_a_past_span_has_the_duration_and_end_it_is_told(recorder: Recorder, seconds: float, ended_ago: float) -> None:
    before = time.time_ns()
    record_span(
        recorder.tracer, "past", context_from(""), seconds, ended_ago=ended_ago, attributes={"tandem.outcome": "ok"}
    )
    after = time.time_ns()
    span = recorder.span("past")
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time - span.start_time == int(seconds * 1e9)
    assert before - int(ended_ago * 1e9) <= span.end_time <= after - int(ended_ago * 1e9)
    assert span.attributes == {"tandem.outcome": "ok"}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:1"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_the_standard_variables_switch_it_on(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], wanted: bool
) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracing_wanted() is wanted


def test_it_is_off_by_default_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    tracing = Tracing("decode", "decode-0")
    with tracing.tracer().start_as_current_span("request") as span:
        assert not span.is_recording() and traceparent_of(span) == ""
    tracing.close()
