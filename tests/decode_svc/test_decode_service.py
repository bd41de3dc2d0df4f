"""The decode worker's gRPC face, over real gRPC; with a real engine on fakes where answers are counted."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, cast

import grpc
import pytest
from opentelemetry import trace

from common.engine.grammar import Grammar
from common.engine.loop import EngineLoop
from common.pb.tandem.v1 import decode_pb2 as pb
from common.pb.tandem.v1 import decode_pb2_grpc
from common.rpc.convert import sampling_to_proto
from common.rpc.status import FIELD_KEY
from common.sampling import FinishReason, GrammarSpec, SampledToken, SamplingParams
from decode_svc.messages import (
    AcceptedOut,
    Cancel,
    CancelOut,
    DecodeOutput,
    DeltaOut,
    FinishedOut,
    RunOut,
    StreamGone,
    Submit,
)
from decode_svc.request import ChoicePrefix, DecodeRequest, Outcome, PrefillTarget, Timings
from decode_svc.service import DecodeServicer
from tests.decode_svc.harness import DecodeHarness
from tests.factories.engines import no_grammar, reference
from tests.factories.rpc import EOF, Duplex, Posts, eventually, make_manifest, serving


class FakePairs:
    def __init__(self) -> None:
        self.wanted: list[str] = []
        self.dispatched: list[object] = []

    def want(self, address: str) -> None:
        self.wanted.append(address)

    def dispatch(self, out: object) -> None:
        self.dispatched.append(out)


class Worker:
    def __init__(self, compile_grammar: Callable[[GrammarSpec], "Future[Grammar]"] = no_grammar) -> None:
        self.posts = Posts()
        self.pairs = FakePairs()
        self.servicer = DecodeServicer(
            worker_id="decode-0",
            incarnation="d-inc",
            manifest=make_manifest(),
            pairs=cast(Any, self.pairs),
            post=self.posts,
            compile_grammar=compile_grammar,
            tracer=trace.NoOpTracer(),
        )
        self.address = ""

    def stream(self) -> Duplex:
        return Duplex(self.address, lambda channel: decode_pb2_grpc.DecodeStub(channel).Submit())

    @contextlib.asynccontextmanager
    async def gateway(self, gateway_id: str = "gw") -> AsyncIterator[Duplex]:
        async with self.stream() as stream:
            await stream.send(pb.GatewayMessage(hello=pb.GatewayHello(gateway_id=gateway_id)))
            assert (await stream.read()).WhichOneof("message") == "hello"
            yield stream

    async def submitted(self, stream: Duplex, request_id: str = "r") -> DecodeRequest:
        """Submit over `stream`; returns what the engine was handed."""
        before = len(self.posts.of(Submit))
        await stream.send(submit(request_id))
        found: list[Submit] = await self.posts.wait_for(Submit, before + 1)
        return found[-1].request


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    async with serving(lambda s: decode_pb2_grpc.add_DecodeServicer_to_server(made.servicer, s)) as made.address:
        yield made


def submit(request_id: str = "r", attempt: int = 0, **fields: Any) -> pb.GatewayMessage:
    values: dict[str, Any] = {"prompt_ids": [5, 6, 7], "choices": [pb.ChoicePrefix()]}
    values["sampling"] = sampling_to_proto(SamplingParams(max_tokens=4))
    return pb.GatewayMessage(submit=pb.SubmitRequest(request_id=request_id, attempt=attempt, **(values | fields)))


def delta(stream: str, index: int, token: int, reason: FinishReason | None = None, choice: int = 0) -> DeltaOut:
    return DeltaOut(stream, "r", 0, choice, index, (SampledToken(token),), reason)


def finished(stream: str, request_id: str = "r") -> FinishedOut:
    return FinishedOut(stream, request_id, 0, Outcome.OK, "", Timings(0.0), 3, 1, 0.5, "")


class TestStream:
    async def test_hello_tells_who_the_worker_is(self, worker: Worker) -> None:
        async with worker.stream() as stream:
            await stream.send(pb.GatewayMessage(hello=pb.GatewayHello(gateway_id="gw")))
            hello = (await stream.read()).hello
            assert hello == pb.DecodeHello(worker_id="decode-0", incarnation="d-inc", manifest=make_manifest())

    async def test_anything_else_first_is_an_error(self, worker: Worker) -> None:
        async with worker.stream() as stream:
            await stream.send(submit())
            assert (await stream.failure()).code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await stream.metadata())[FIELD_KEY] == "hello"
        assert worker.posts.all == []

    async def test_a_submission_reaches_the_engine_whole(self, worker: Worker) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=3)
        async with worker.gateway() as stream:
            await stream.send(
                submit(
                    attempt=2,
                    choices=[pb.ChoicePrefix(output_ids=[1, 2]), pb.ChoicePrefix(output_ids=[3], finished=True)],
                    sampling=sampling_to_proto(params),
                    prefill_candidates=[pb.PrefillCandidate(worker_id="p", address="p:1")],
                    cache_salt="salt",
                    traceparent="tp",
                    timeout_seconds=2.5,
                )
            )
            (command,) = await worker.posts.wait_for(Submit)
            assert command == Submit(
                DecodeRequest(
                    command.request.stream,
                    "r",
                    2,
                    (5, 6, 7),
                    (ChoicePrefix((1, 2)), ChoicePrefix((3,), finished=True)),
                    params,
                    (PrefillTarget("p", "p:1"),),
                    "salt",
                    "tp",
                    2.5,
                ),
                draining=False,
            )
            assert worker.pairs.wanted == ["p:1"]

    async def test_no_time_limit_is_none(self, worker: Worker) -> None:
        async with worker.gateway() as stream:
            assert (await worker.submitted(stream)).timeout is None

    async def test_draining_is_told_to_the_engine(self, worker: Worker) -> None:
        worker.servicer.draining = True
        async with worker.gateway() as stream:
            await worker.submitted(stream)
            assert worker.posts.of(Submit)[0].draining

    async def test_cancel_of_a_request_and_of_its_first_choice_differ(self, worker: Worker) -> None:
        async with worker.gateway() as stream:
            await stream.send(pb.GatewayMessage(cancel=pb.CancelRequest(request_id="r", attempt=1)))
            await stream.send(pb.GatewayMessage(cancel=pb.CancelRequest(request_id="r", attempt=1, choice=0)))
            assert await worker.posts.wait_for(Cancel, 2) == [Cancel("r", 1, None), Cancel("r", 1, 0)]

    async def test_a_broken_stream_is_told_once_and_the_others_go_on(self, worker: Worker) -> None:
        async with worker.gateway("one") as one, worker.gateway("two") as two:
            ours = (await worker.submitted(one)).stream
            theirs = (await worker.submitted(two)).stream
            assert ours != theirs
            one.cancel()
            assert await worker.posts.wait_for(StreamGone) == [StreamGone(ours)]
            worker.servicer.deliver([finished(ours), finished(theirs, "other")])
            assert [f.request_id for f in (await two.read()).step.finished] == ["other"]
        assert await worker.posts.wait_for(StreamGone, 2) == [StreamGone(ours), StreamGone(theirs)]

    async def test_two_streams_of_one_gateway_are_two(self, worker: Worker) -> None:
        async with worker.gateway("gw") as one, worker.gateway("gw") as two:
            assert (await worker.submitted(one)).stream != (await worker.submitted(two)).stream

    async def test_a_gateway_that_says_no_more_gets_what_is_pending_and_the_end(self, worker: Worker) -> None:
        async with worker.gateway() as stream:
            key = (await worker.submitted(stream)).stream
            worker.servicer.deliver([AcceptedOut(key, "r", 0)])
            await stream.half_close()
            assert (await stream.read()).WhichOneof("message") == "accepted"
            assert await stream.read() is EOF
        assert await worker.posts.wait_for(StreamGone) == [StreamGone(key)]

    async def test_what_is_for_prefill_workers_goes_to_the_pairs(self, worker: Worker) -> None:
        target = PrefillTarget("p", "p:1")
        outs: list[DecodeOutput] = [
            RunOut(target, 1, "r", (1,), 0, (0,), SamplingParams(), "", ""),
            CancelOut(target, 1),
        ]
        worker.servicer.deliver(outs)
        assert worker.pairs.dispatched == outs


class TestCoalescing:
    async def test_the_outputs_of_one_engine_step_are_one_message(self, worker: Worker) -> None:
        async with worker.gateway() as stream:
            key = (await worker.submitted(stream)).stream
            worker.servicer.deliver([delta(key, 0, 4), delta(key, 0, 5, choice=1), finished(key)])
            step = (await stream.read()).step
            assert [(d.choice, list(d.token_ids)) for d in step.deltas] == [(0, [4]), (1, [5])]
            assert [f.request_id for f in step.finished] == ["r"]

    async def test_a_slow_gateway_gets_fewer_and_larger_steps_without_loss(self, worker: Worker) -> None:
        count, width = 400, 500
        tokens = tuple(SampledToken(100_000 + i) for i in range(width))
        async with worker.gateway() as stream:
            key = (await worker.submitted(stream)).stream
            for index in range(count):
                worker.servicer.deliver([DeltaOut(key, "r", 0, 0, index * width, tokens, None)])
                await asyncio.sleep(0)
            worker.servicer.deliver([delta(key, count * width, 7, FinishReason.STOP), finished(key)])
            steps = [(await stream.read()).step]
            while not steps[-1].finished:
                steps.append((await stream.read()).step)
        deltas = [d for step in steps for d in step.deltas]
        assert all(len(step.deltas) == 1 for step in steps)
        assert len(steps) < count / 2
        expected = 0
        for found in deltas:
            assert found.first_index == expected
            expected += len(found.token_ids)
        assert expected == count * width + 1
        assert [d.finish_reason for d in deltas] == [0] * (len(deltas) - 1) + [1]


async def test_every_submission_has_one_answer_and_every_accepted_one_one_end() -> None:
    """The whole worker over gRPC, but for the model: many requests from two gateways, good, bad and too many."""
    harness = DecodeHarness(num_blocks=16, max_waiting=3, max_request_tokens=40)
    worker, loop = Worker(), asyncio.get_running_loop()
    harness.engine._emit = lambda outputs: loop.call_soon_threadsafe(worker.servicer.deliver, outputs)  # type: ignore[assignment]
    fatal: list[BaseException] = []
    engine_loop = EngineLoop(harness.engine, name="test-engine", on_fatal=fatal.append)
    worker.servicer._post = engine_loop.post
    params = SamplingParams(max_tokens=6, seed=3)
    prompts = {f"r{i}": [2 + (i * 7 + j) % 20 for j in range(1 + i % 11)] for i in range(30)}
    answers: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}

    async def talk(stream: Duplex, mine: list[str]) -> None:
        for request_id in mine:
            fields: dict[str, Any] = {"prompt_ids": prompts[request_id], "sampling": sampling_to_proto(params)}
            if request_id.endswith("7"):
                fields["prompt_ids"] = []
            await stream.send(submit(request_id, **fields))
        while sum(answers[r] for r in mine) < len(mine) or any(kinds[f"accepted {r}"] and not ends[r] for r in mine):
            message = await stream.read()
            kind = message.WhichOneof("message")
            if kind == "step":
                for found in message.step.deltas:
                    tokens[found.request_id] += found.token_ids
                ends.update(f.request_id for f in message.step.finished)
            else:
                request_id = getattr(message, kind).request_id
                answers[request_id] += 1
                kinds[f"{kind} {request_id}"] += 1

    engine_loop.start()
    try:
        async with serving(
            lambda s: decode_pb2_grpc.add_DecodeServicer_to_server(worker.servicer, s)
        ) as worker.address:
            async with worker.gateway("one") as one, worker.gateway("two") as two:
                await asyncio.gather(talk(one, list(prompts)[::2]), talk(two, list(prompts)[1::2]))
            await eventually(lambda: harness.engine.snapshot.owned == 0)
    finally:
        assert engine_loop.stop(timeout=5.0)
    assert not fatal
    assert answers == Counter(dict.fromkeys(prompts, 1))
    accepted = [r for r in prompts if kinds[f"accepted {r}"]]
    assert ends == Counter(dict.fromkeys(accepted, 1)) and accepted
    assert {r for r in prompts if kinds[f"rejected {r}"]} == {"r7", "r17", "r27"}
    for request_id in accepted:
        assert tokens[request_id] == reference(prompts[request_id], params, 0, 40)[0]
