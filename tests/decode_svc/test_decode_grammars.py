"""Requests with a grammar over the decode worker's gRPC face: each has one answer, whatever happens meanwhile."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.engine.loop import EngineLoop
from common.errors import InvalidRequest, Overloaded
from common.pb.tandem.v1 import decode_pb2 as pb
from common.pb.tandem.v1 import decode_pb2_grpc
from common.rpc.convert import sampling_to_proto
from common.sampling import GrammarKind, GrammarSpec, SamplingParams
from decode_svc.messages import Cancel, StreamGone, Submit
from tests.decode_svc.harness import DecodeHarness
from tests.decode_svc.test_decode_service import Worker, submit
from tests.factories.engines import compile_regex, reference
from tests.factories.grammars import Grammars
from tests.factories.rpc import Duplex, eventually, serving

PATTERN = "[a-v]*"
SPEC = GrammarSpec(GrammarKind.EBNF, f"root ::= {PATTERN}")


@pytest.fixture
def grammars() -> Grammars:
    return Grammars()


@pytest.fixture
async def worker(grammars: Grammars) -> AsyncIterator[Worker]:
    made = Worker(grammars)
    async with serving(lambda s: decode_pb2_grpc.add_DecodeServicer_to_server(made.servicer, s)) as made.address:
        yield made


def with_grammar(request_id: str = "r", spec: GrammarSpec = SPEC, **fields: Any) -> pb.GatewayMessage:
    params = SamplingParams(max_tokens=4, grammar=spec)
    return submit(request_id, **({"sampling": sampling_to_proto(params)} | fields))


def cancel(request_id: str = "r", attempt: int = 0, choice: int | None = None) -> pb.GatewayMessage:
    return pb.GatewayMessage(cancel=pb.CancelRequest(request_id=request_id, attempt=attempt, choice=choice))


async def compiling(worker: Worker, count: int = 1) -> None:
    await eventually(lambda: worker.servicer.num_compiling == count)


class TestCompiled:
    async def test_the_engine_gets_it_with_its_grammar(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar(prefill_candidates=[pb.PrefillCandidate(worker_id="p", address="p:1")]))
            await compiling(worker)
            assert grammars.asked == [SPEC] and worker.posts.all == []
            # Pairing need not wait for it.
            assert worker.pairs.wanted == ["p:1"]
            grammar = grammars.finish()
            [command] = await worker.posts.wait_for(Submit)
            assert command.request.grammar is grammar and command.request.params.grammar == SPEC
            assert worker.servicer.num_compiling == 0

    async def test_others_overtake_it(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar("first"))
            await stream.send(with_grammar("second"))
            await stream.send(submit("third"))
            await compiling(worker, 2)
            assert [c.request.request_id for c in await worker.posts.wait_for(Submit)] == ["third"]
            grammars.finish(1)
            await worker.posts.wait_for(Submit, 2)
            grammars.finish(0)
            found = await worker.posts.wait_for(Submit, 3)
            assert [c.request.request_id for c in found] == ["third", "second", "first"]

    async def test_the_time_that_it_took_counts(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar(timeout_seconds=1000.0))
            await compiling(worker)
            grammars.finish()
            [command] = await worker.posts.wait_for(Submit)
            assert 0.0 < command.request.timeout < 1000.0

    async def test_one_that_is_there_at_once_is_no_exception(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar("a"))
            await compiling(worker)
            kept = grammars.finish()
            worker.servicer._grammars._compile = lambda _: grammars.futures[0]
            await stream.send(with_grammar("b"))
            found = await worker.posts.wait_for(Submit, 2)
            assert found[1].request.grammar is kept


class TestRefused:
    async def test_what_is_wrong_with_it_is_answered(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar(attempt=3))
            await compiling(worker)
            grammars.fail(InvalidRequest("too complex: why", field="grammar"))
            answer = (await stream.read()).rejected
            assert answer == pb.Rejected(request_id="r", attempt=3, field="grammar", message="too complex: why")
        assert worker.posts.of(Submit) == []

    async def test_a_full_compiler_is_a_shortage(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar())
            await compiling(worker)
            grammars.fail(Overloaded("many are waiting", retry_after=2.5))
            answer = (await stream.read()).shortage
            assert answer == pb.Shortage(request_id="r", message="many are waiting", retry_after_seconds=2.5)
        assert worker.posts.of(Submit) == []

    async def test_a_draining_worker_compiles_nothing(self, worker: Worker, grammars: Grammars) -> None:
        worker.servicer.draining = True
        async with worker.gateway() as stream:
            await stream.send(with_grammar())
            assert "draining" in (await stream.read()).shortage.message
        assert grammars.asked == []

    async def test_one_that_drains_meanwhile_tells_the_engine(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar())
            await compiling(worker)
            worker.servicer.draining = True
            grammars.finish()
            assert (await worker.posts.wait_for(Submit))[0].draining

    @pytest.mark.parametrize("kind", [0, 99])
    async def test_an_unknown_kind_is_answered_and_the_stream_goes_on(self, worker: Worker, kind: int) -> None:
        message = with_grammar()
        message.submit.sampling.grammar.kind = kind  # type: ignore[assignment]
        async with worker.gateway() as stream:
            await stream.send(message)
            answer = (await stream.read()).rejected
            assert (answer.request_id, answer.field) == ("r", "grammar") and f"kind {kind}" in answer.message
            await stream.send(submit("next"))
            assert (await worker.posts.wait_for(Submit))[0].request.request_id == "next"

    async def test_the_same_attempt_twice(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar())
            await stream.send(with_grammar())
            answer = (await stream.read()).rejected
            assert (answer.field, answer.message) == ("request_id", "this attempt is running already")
            grammars.finish()
            assert len(await worker.posts.wait_for(Submit)) == 1
            assert len(grammars.asked) == 1


class TestMeanwhile:
    async def test_a_cancelled_one_is_accepted_and_over(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar(choices=[pb.ChoicePrefix(output_ids=[4, 5]), pb.ChoicePrefix()]))
            await compiling(worker)
            await stream.send(cancel())
            assert (await stream.read()).accepted == pb.Accepted(request_id="r")
            [ended] = (await stream.read()).step.finished
            assert (ended.request_id, ended.outcome) == ("r", pb.OUTCOME_CANCELLED)
            assert (ended.stats.prompt_tokens, ended.stats.output_tokens) == (3, 2)
            assert grammars.futures[0].cancelled() and worker.servicer.num_compiling == 0
            # Once is enough; another attempt is another request.
            await stream.send(cancel())
            await stream.send(with_grammar(attempt=1))
            assert await worker.posts.wait_for(Cancel) == [Cancel("r", 0)]
            await compiling(worker)
            grammars.finish(1)
            assert [c.request.attempt for c in await worker.posts.wait_for(Submit)] == [1]

    async def test_a_cancelled_choice_is_told_to_the_engine_behind_its_request(
        self, worker: Worker, grammars: Grammars
    ) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar(choices=[pb.ChoicePrefix(), pb.ChoicePrefix()]))
            await compiling(worker)
            await stream.send(cancel(choice=1))
            await stream.send(cancel(choice=0))
            await stream.send(cancel("other"))
            await worker.posts.wait_for(Cancel)
            grammars.finish()
            await worker.posts.wait_for(Cancel, 3)
            kinds = [type(command) for command in worker.posts.all]
            assert kinds == [Cancel, Submit, Cancel, Cancel]
            assert worker.posts.of(Cancel)[1:] == [Cancel("r", 0, 1), Cancel("r", 0, 0)]

    async def test_one_that_takes_too_long_is_accepted_and_over(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway() as stream:
            await stream.send(with_grammar(timeout_seconds=0.01))
            assert (await stream.read()).WhichOneof("message") == "accepted"
            [ended] = (await stream.read()).step.finished
            assert ended.outcome == pb.OUTCOME_DEADLINE and "0.010 s" in ended.message
            assert grammars.futures[0].cancelled()

    async def test_a_lost_stream_takes_its_own_with_it(self, worker: Worker, grammars: Grammars) -> None:
        async with worker.gateway("one") as one, worker.gateway("two") as two:
            await one.send(with_grammar("mine"))
            await compiling(worker)
            await two.send(with_grammar("theirs"))
            await compiling(worker, 2)
            one.cancel()
            await worker.posts.wait_for(StreamGone)
            assert grammars.futures[0].cancelled() and not grammars.futures[1].cancelled()
            grammars.finish(1)
            assert [c.request.request_id for c in await worker.posts.wait_for(Submit)] == ["theirs"]

    async def test_a_grammar_that_comes_as_its_stream_goes_is_not_wanted(
        self, worker: Worker, grammars: Grammars, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It was ready already when the stream was lost, so that it could not be cancelled any more."""
        for index, settle in enumerate((grammars.finish, lambda i: grammars.fail(InvalidRequest("why"), i))):
            async with worker.gateway() as stream:
                await stream.send(with_grammar())
                await compiling(worker)
                settle(index)
                worker.servicer._grammars.drop_stream(next(iter(worker.servicer._streams)))
                assert worker.servicer.num_compiling == 0
        assert worker.posts.of(Submit) == [] and not caplog.records


@dataclass
class Told:
    """What a gateway has been told, by request."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def take(self, message: pb.DecodeMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            for delta in message.step.deltas:
                self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.ends.update(ended.request_id for ended in message.step.finished)
        else:
            self.answers[kind or "", getattr(message, kind or "").request_id] += 1

    def is_over(self, request_id: str) -> bool:
        answered = [kind for kind, name in self.answers if name == request_id]
        return bool(answered) and (answered != ["accepted"] or self.ends[request_id] > 0)


async def test_with_an_engine_every_submission_has_one_answer_and_every_accepted_one_one_end() -> None:
    """Grammars that come late, at once, never, or are refused, with cancels at all times."""
    harness, grammars = DecodeHarness(num_blocks=32, max_waiting=20, max_request_tokens=40), Grammars()
    worker, loop = Worker(grammars), asyncio.get_running_loop()
    harness.engine._emit = lambda outputs: loop.call_soon_threadsafe(worker.servicer.deliver, outputs)  # type: ignore[assignment]
    fatal: list[BaseException] = []
    engine_loop = EngineLoop(harness.engine, name="test-engine", on_fatal=fatal.append)
    worker.servicer._post = engine_loop.post
    params = SamplingParams(max_tokens=6, seed=3, grammar=SPEC)
    names = [f"r{i}" for i in range(24)]
    told = Told()

    async def talk(stream: Duplex) -> None:
        for number, name in enumerate(names):
            await stream.send(submit(name, sampling=sampling_to_proto(params)))
            await eventually(lambda count=number: len(grammars.futures) > count)
            if number % 4 == 0:
                grammars.finish(number)
            elif number % 4 == 1:
                grammars.fail(InvalidRequest("why", field="grammar"), number)
            if number % 3 == 0 or number % 4 == 3:
                await stream.send(cancel(name))
        while not all(told.is_over(name) for name in names):
            if not (stuck := [i for i, f in enumerate(grammars.futures) if not f.done()]):
                told.take(await stream.read())
            for number in stuck:
                if grammars.futures[number].set_running_or_notify_cancel():
                    grammars.futures[number].set_result(compile_regex(PATTERN))

    engine_loop.start()
    try:
        async with serving(
            lambda s: decode_pb2_grpc.add_DecodeServicer_to_server(worker.servicer, s)
        ) as worker.address:
            async with worker.gateway() as stream, asyncio.timeout(60):
                await talk(stream)
            await eventually(lambda: harness.engine.snapshot.owned == 0)
    finally:
        assert engine_loop.stop(timeout=5.0)
    assert not fatal
    assert sum(told.answers.values()) == len(names) == len({name for _, name in told.answers})
    assert told.ends == Counter(name for kind, name in told.answers if kind == "accepted")
    expected = reference([5, 6, 7], params, 0, 40, compile_regex(PATTERN))[0]
    for number, name in enumerate(names):
        assert told.tokens.get(name, []) == expected[: len(told.tokens.get(name, []))]
        if number % 4 == 0 and number % 3:
            assert told.tokens[name] == expected
