"""The prefill worker's gRPC face, over real gRPC, with no engine behind it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, cast

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.engine.grammar import Grammar
from common.pb.tandem.v1 import prefill_pb2 as pb
from common.pb.tandem.v1 import prefill_pb2_grpc
from common.pb.tandem.v1.transport_pb2 import SlotGrant as SlotGrantMessage
from common.pb.tandem.v1.transport_pb2 import TransportPeer
from common.rpc.convert import sampling_to_proto
from common.rpc.status import FIELD_KEY
from common.sampling import Candidate, GrammarKind, SampledToken, SamplingParams, TokenLogprobs
from common.telemetry.tracing import traceparent_of
from kv_store.staging import SlotGrant
from kv_store.transport.base import PeerUnreachable
from prefill_svc.request import Cancel, Ended, FirstTokens, PeerGone, PrefillRequest, Progressed, Run
from prefill_svc.service import PrefillServicer
from tests.factories.engines import FakePairing, no_grammar
from tests.factories.rpc import EOF, Duplex, Posts, eventually, make_manifest, serving

PARAMS = SamplingParams(temperature=0.5, seed=2**63 + 1, logit_bias={3: -1.0}, logprobs=0)


class Worker:
    def __init__(
        self,
        load_grammar: Callable[[GrammarKind, bytes], "Future[Grammar]"] = no_grammar,
        find_grammar: Callable[[GrammarKind, bytes], "Future[Grammar | None]"] = no_grammar,
        **manifest: Any,
    ) -> None:
        self.posts = Posts()
        self.transfer = FakePairing("prefill-agent")
        self.servicer = PrefillServicer(
            worker_id="prefill-0",
            incarnation="p-inc",
            manifest=make_manifest(**manifest),
            transfer=cast(Any, self.transfer),
            post=self.posts,
            load_grammar=load_grammar,
            find_grammar=find_grammar,
            tracer=trace.NoOpTracer(),
        )
        self.address = ""

    def stream(self) -> Duplex:
        return Duplex(self.address, lambda channel: prefill_pb2_grpc.PrefillStub(channel).Run())

    @contextlib.asynccontextmanager
    async def paired(self, incarnation: str = "d-inc", worker_id: str = "decode-0") -> AsyncIterator[Duplex]:
        async with self.stream() as stream:
            await stream.send(hello(incarnation=incarnation, worker_id=worker_id))
            assert (await stream.read()).WhichOneof("message") == "hello"
            yield stream


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    async with serving(lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(made.servicer, s)) as made.address:
        yield made


def hello(incarnation: str = "d-inc", worker_id: str = "decode-0", **manifest: Any) -> pb.PrefillCommand:
    return pb.PrefillCommand(
        hello=pb.PairHello(
            worker_id=worker_id,
            incarnation=incarnation,
            manifest=make_manifest(**manifest),
            transport=TransportPeer(transport="fake", agent=f"agent of {incarnation}"),
        )
    )


def run(transfer_id: int = 7) -> pb.PrefillCommand:
    return pb.PrefillCommand(
        run=pb.RunRequest(
            transfer_id=transfer_id,
            request_id="r1",
            prompt_ids=[5, 6, 7],
            first_token=1,
            first_choices=[0, 2],
            sampling=sampling_to_proto(PARAMS),
            cache_salt="salt",
            traceparent="tp",
        )
    )


class TestHello:
    async def test_both_sides_introduce_themselves(self, worker: Worker) -> None:
        async with worker.stream() as stream:
            await stream.send(hello())
            theirs = (await stream.read()).hello
            assert (theirs.worker_id, theirs.incarnation) == ("prefill-0", "p-inc")
            assert theirs.manifest == make_manifest()
            assert theirs.transport.agent == "prefill-agent"
            assert worker.servicer.paired == ["decode-0"]
            assert worker.transfer.calls == [("connect", "d-inc", "agent of d-inc", False)]

    async def test_anything_else_first_is_an_error(self, worker: Worker) -> None:
        async with worker.stream() as stream:
            await stream.send(run())
            error = await stream.failure()
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await stream.metadata())[FIELD_KEY] == "hello"
        assert worker.posts.all == [] == worker.transfer.calls

    async def test_a_mismatch_is_refused_in_words_and_remembered_until_it_is_mended(self, worker: Worker) -> None:
        async with worker.stream() as stream:
            await stream.send(hello(num_layers=9, kv_dtype="float16"))
            error = await stream.failure()
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            words = error.details() or ""
            assert "num_layers: 2 here, 9 there" in words
            assert "kv_dtype: 'float32' here, 'float16' there" in words
        assert worker.servicer.refused == {"decode-0": words}
        assert worker.servicer.paired == [] and worker.transfer.calls == [] and worker.posts.all == []
        async with worker.paired():
            assert worker.servicer.refused == {}

    async def test_transports_that_do_not_fit_are_refused_in_words(self, worker: Worker) -> None:
        worker.transfer.refuse = ValueError("transport: d-inc uses 'grpc', this worker 'ucx'")
        async with worker.stream() as stream:
            await stream.send(hello())
            error = await stream.failure()
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "uses 'grpc', this worker 'ucx'" in (error.details() or "")
        assert "'ucx'" in worker.servicer.refused["decode-0"]
        assert worker.servicer.paired == []

    async def test_an_unreachable_transport_is_worth_another_try(self, worker: Worker) -> None:
        worker.transfer.refuse = PeerUnreachable("no route")
        async with worker.stream() as stream:
            await stream.send(hello())
            error = await stream.failure()
            assert error.code() is grpc.StatusCode.UNAVAILABLE and "no route" in (error.details() or "")
        assert worker.servicer.refused == {}
        worker.transfer.refuse = None
        async with worker.paired():
            assert worker.servicer.paired == ["decode-0"]

    async def test_one_incarnation_pairs_once_at_a_time(self, worker: Worker) -> None:
        async with worker.paired() as first:
            async with worker.stream() as second:
                await second.send(hello())
                assert (await second.failure()).code() is grpc.StatusCode.UNAVAILABLE
            assert worker.servicer.paired == ["decode-0"]
            first.cancel()
            await eventually(lambda: worker.servicer.paired == [])
        async with worker.paired():
            assert worker.servicer.paired == ["decode-0"]


class TestCommands:
    async def test_they_reach_the_engine_and_the_transfer(self, worker: Worker) -> None:
        async with worker.paired() as stream:
            await stream.send(run())
            await stream.send(pb.PrefillCommand(cancel=pb.CancelTransfer(transfer_id=7)))
            grants = [SlotGrantMessage(slot=1, generation=2), SlotGrantMessage(slot=3, generation=4)]
            await stream.send(pb.PrefillCommand(credit=pb.Credit(grants=grants)))
            await eventually(lambda: len(worker.transfer.calls) == 2)
            request = PrefillRequest("d-inc", 7, "r1", (5, 6, 7), 1, (0, 2), PARAMS, "salt", "tp")
            assert worker.posts.all == [Run(request), Cancel("d-inc", 7)]
            assert worker.transfer.calls[1] == ("add_credits", "d-inc", (SlotGrant(1, 2), SlotGrant(3, 4)))

    async def test_a_draining_worker_answers_shortage(self, worker: Worker) -> None:
        async with worker.paired() as stream:
            worker.servicer.draining = True
            await stream.send(run(9))
            terminal = (await stream.read()).terminal
            assert (terminal.transfer_id, terminal.outcome) == (9, pb.TRANSFER_OUTCOME_SHORTAGE)
            assert "draining" in terminal.message
            assert worker.posts.all == []


class TestEvents:
    async def test_each_output_goes_to_its_own_peer_in_order(self, worker: Worker) -> None:
        async with worker.paired("d1", "decode-1") as one, worker.paired("d2", "decode-2") as two:
            assert worker.servicer.paired == ["decode-1", "decode-2"]
            logprobs = TokenLogprobs(Candidate(4, -0.5), (Candidate(4, -0.5), Candidate(5, -1.5)))
            worker.servicer.deliver(
                [
                    Progressed("d1", 1, 16),
                    FirstTokens("d2", 2, [(0, SampledToken(4, logprobs)), (2, SampledToken(6))]),
                    Ended("gone", 3, "ok"),
                    Ended("d1", 1, "ok", "", 3, 300, 16, 4, 0.5, 0.25, 0.125),
                    Ended("d2", 2, "failed", "why"),
                ]
            )
            assert (await one.read()).progress == pb.Progress(transfer_id=1, tokens_done=16)
            assert (await one.read()).terminal == pb.Terminal(
                transfer_id=1,
                outcome=pb.TRANSFER_OUTCOME_OK,
                messages=3,
                bytes=300,
                cached_tokens=16,
                computed_tokens=4,
                prefill_seconds=0.5,
                since_compute_seconds=0.25,
                transfer_seconds=0.125,
            )
            first = (await two.read()).first
            assert [(t.choice, t.token_id, t.HasField("logprobs")) for t in first.tokens] == [
                (0, 4, True),
                (2, 6, False),
            ]
            assert [c.token_id for c in first.tokens[0].logprobs.top] == [4, 5]
            terminal = (await two.read()).terminal
            assert (terminal.outcome, terminal.message) == (pb.TRANSFER_OUTCOME_FAILED, "why")

    @pytest.mark.parametrize("outcome", ["ok", "cancelled", "shortage", "rejected", "failed"])
    async def test_every_outcome_has_its_own_word(self, worker: Worker, outcome: str) -> None:
        async with worker.paired() as stream:
            worker.servicer.deliver([Ended("d-inc", 1, outcome)])
            found = pb.TransferOutcome.Name((await stream.read()).terminal.outcome)
            assert found == f"TRANSFER_OUTCOME_{outcome.upper()}"


class TestEnd:
    async def test_a_broken_stream_is_told_once(self, worker: Worker) -> None:
        async with worker.paired() as stream, worker.paired("other", "decode-1"):
            stream.cancel()
            await worker.posts.wait_for(PeerGone)
            assert worker.servicer.paired == ["decode-1"]
        await worker.posts.wait_for(PeerGone, 2)
        assert worker.posts.all == [PeerGone("d-inc"), PeerGone("other")]
        assert [c for c in worker.transfer.calls if c[0] == "disconnect"] == [
            ("disconnect", "d-inc"),
            ("disconnect", "other"),
        ]

    async def test_a_stream_that_the_decode_worker_closes_is_answered_with_its_end(self, worker: Worker) -> None:
        async with worker.paired() as stream:
            await stream.half_close()
            assert await stream.read() is EOF
            await eventually(lambda: worker.servicer.paired == [])
        assert worker.posts.all == [PeerGone("d-inc")]

    async def test_a_peer_that_the_transport_lost_may_pair_anew(self, worker: Worker) -> None:
        async with worker.paired() as stream:
            worker.servicer.drop_peer("unknown", "never heard of")
            worker.servicer.drop_peer("d-inc", "a write failed")
            assert await stream.read() is EOF
        assert worker.posts.all == [PeerGone("d-inc")]
        async with worker.paired():
            assert worker.servicer.paired == ["decode-0"]

    async def test_a_command_that_cannot_be_read_ends_the_stream_with_an_error(
        self, worker: Worker, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with worker.paired() as stream:
            bad = run()
            bad.run.sampling.Clear()
            worker.servicer._post = cast(Any, None)
            await stream.send(bad)
            error = await stream.failure()
            assert error.code() is grpc.StatusCode.INTERNAL and error.details() == "internal error"
            worker.servicer._post = worker.posts
        assert "unexpected error" in caplog.text


async def test_an_ended_run_leaves_its_spans_in_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    worker = Worker()
    worker.servicer._tracer = provider.get_tracer("test")
    with worker.servicer._tracer.start_as_current_span("request") as parent:
        traceparent = traceparent_of(parent)
    async with (
        serving(lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(worker.servicer, s)) as worker.address,
        worker.paired() as stream,
    ):
        command = run(7)
        command.run.traceparent = traceparent
        await stream.send(command)
        await worker.posts.wait_for(Run)
        worker.servicer.deliver([Ended("d-inc", 7, "ok", "", 3, 300, 16, 4, 0.5, 0.25, 0.125)])
    spans = {span.name: span for span in exporter.get_finished_spans()}
    provider.shutdown()
    assert set(spans) == {"request", "prefill", "transfer"}
    for name, seconds in (("prefill", 0.5), ("transfer", 0.125)):
        span = spans[name]
        assert span.context.trace_id == spans["request"].context.trace_id
        assert span.end_time is not None and span.start_time is not None
        assert span.end_time - span.start_time == int(seconds * 1e9)
    assert spans["prefill"].attributes == {
        "tandem.worker": "prefill-0",
        "tandem.outcome": "ok",
        "tandem.cached_tokens": 16,
        "tandem.computed_tokens": 4,
    }
    assert spans["transfer"].attributes == {"tandem.bytes": 300, "tandem.messages": 3}
