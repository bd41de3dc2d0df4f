"""One request is one trace: the dispatcher's spans, and the context that it hands to the decode worker."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.gateway.dispatching import collect, request, rig
from tests.gateway.fake_workers import FakeWorker


async def test_spans_of_a_request_are_children_of_the_edges_span() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    worker = FakeWorker()
    async with rig(worker, tracer=tracer) as parts:
        with tracer.start_as_current_span("request") as parent:
            generation = await parts.dispatcher.submit(request())
        await collect(generation)
        await generation.aclose()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"request", "queue", "route", "first token", "decode"}
    context = parent.get_span_context()
    for name in ("queue", "route", "first token", "decode"):
        assert spans[name].parent is not None
        assert spans[name].parent.span_id == context.span_id, name
        assert spans[name].context.trace_id == context.trace_id
    assert spans["route"].attributes is not None
    assert spans["route"].attributes["tandem.decode_worker"] == "decode-0"
    assert worker.runs[0].submit.traceparent.startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
    order = [spans[name].start_time for name in ("queue", "route", "first token", "decode")]
    assert order == sorted(order)
