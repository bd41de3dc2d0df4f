"""Requests with a grammar over the prefill worker's gRPC face: it is loaded first, and each has one Terminal."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from common.engine.grammar.loader import GrammarLoader
from common.errors import InvalidRequest, Overloaded
from common.pb.tandem.v1 import prefill_pb2 as pb
from common.pb.tandem.v1 import prefill_pb2_grpc
from common.rpc.convert import sampling_to_proto
from common.sampling import GrammarKind, GrammarSpec
from prefill_svc.request import Cancel, PeerGone, Run
from tests.factories.grammars import Grammars
from tests.factories.rpc import Duplex, eventually, serving
from tests.prefill_svc.test_prefill_service import PARAMS, Worker, run

SPEC = GrammarSpec(GrammarKind.EBNF, "root ::= [a-v]*")


@pytest.fixture
def grammars() -> Grammars:
    return Grammars()


@pytest.fixture
def kept() -> Grammars:
    """What is looked for by digest."""
    return Grammars()


@pytest.fixture
async def worker(grammars: Grammars, kept: Grammars) -> AsyncIterator[Worker]:
    made = Worker(grammars, kept)
    async with serving(lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(made.servicer, s)) as made.address:
        yield made


def with_grammar(transfer_id: int = 7, compiled: bytes = b"compiled") -> pb.PrefillCommand:
    command = run(transfer_id)
    command.run.sampling.CopyFrom(sampling_to_proto(replace(PARAMS, grammar=SPEC)))
    command.run.compiled_grammar = compiled
    return command


def with_digest(transfer_id: int = 7) -> pb.PrefillCommand:
    command = with_grammar(transfer_id)
    command.run.grammar_digest = b"digest"
    return command


def supply(transfer_id: int = 7, compiled: bytes = b"compiled") -> pb.PrefillCommand:
    return pb.PrefillCommand(grammar=pb.CompiledGrammar(transfer_id=transfer_id, compiled_grammar=compiled))


def cancel(transfer_id: int = 7) -> pb.PrefillCommand:
    return pb.PrefillCommand(cancel=pb.CancelTransfer(transfer_id=transfer_id))


async def loading(worker: Worker, count: int = 1) -> None:
    await eventually(lambda: worker.servicer.num_loading == count)


async def test_the_engine_gets_it_with_its_grammar_and_others_overtake_it(worker: Worker, grammars: Grammars) -> None:
    async with worker.paired() as stream:
        await stream.send(with_grammar())
        await stream.send(run(8))
        [other] = await worker.posts.wait_for(Run)
        assert other.request.transfer_id == 8 and other.request.grammar is None
        assert grammars.asked == [(SPEC.kind, b"compiled")] and worker.servicer.num_loading == 1
        grammar = grammars.finish()
        _, found = await worker.posts.wait_for(Run, 2)
        assert found.request.transfer_id == 7 and found.request.grammar is grammar
        assert found.request.params.grammar == SPEC and worker.servicer.num_loading == 0


@pytest.mark.parametrize(
    ("error", "outcome", "words"),
    [
        (
            InvalidRequest("no such", field="compiled_grammar"),
            pb.TRANSFER_OUTCOME_REJECTED,
            "compiled_grammar: no such",
        ),
        (Overloaded("stopping"), pb.TRANSFER_OUTCOME_SHORTAGE, "stopping"),
    ],
)
async def test_one_that_cannot_be_loaded_ends_in_words(
    worker: Worker, grammars: Grammars, error: InvalidRequest | Overloaded, outcome: int, words: str
) -> None:
    async with worker.paired() as stream:
        await stream.send(with_grammar())
        await loading(worker)
        grammars.fail(error)
        terminal = (await stream.read()).terminal
        assert (terminal.transfer_id, terminal.outcome, terminal.message) == (7, outcome, words)
        assert worker.posts.all == []


async def test_one_that_is_kept_is_found_by_its_digest(worker: Worker, grammars: Grammars, kept: Grammars) -> None:
    async with worker.paired() as stream:
        await stream.send(with_digest())
        await loading(worker)
        grammar = kept.finish()
        [command] = await worker.posts.wait_for(Run)
        assert command.request.grammar is grammar and worker.servicer.num_loading == 0
        assert kept.asked == [(SPEC.kind, b"digest")] and grammars.asked == []


class TestWanted:
    """One that is not kept is asked for, and the request waits for it."""

    @staticmethod
    async def ask(worker: Worker, stream: Duplex, kept: Grammars) -> None:
        await stream.send(with_digest())
        await loading(worker)
        kept.miss()
        assert (await stream.read()).grammar_wanted.transfer_id == 7
        assert worker.servicer.num_loading == 1

    async def test_it_goes_on_with_what_is_supplied(self, worker: Worker, grammars: Grammars, kept: Grammars) -> None:
        async with worker.paired() as stream:
            await self.ask(worker, stream, kept)
            await stream.send(supply(8))
            await stream.send(supply())
            await stream.send(supply(compiled=b"twice"))
            await stream.send(run(9))
            await worker.posts.wait_for(Run)
            assert grammars.asked == [(SPEC.kind, b"compiled")]
            grammar = grammars.finish()
            _, command = await worker.posts.wait_for(Run, 2)
            assert (command.request.transfer_id, command.request.grammar) == (7, grammar)
            assert len(kept.asked) == 1 and worker.servicer.num_loading == 0

    async def test_what_is_wrong_with_it_is_said(self, worker: Worker, grammars: Grammars, kept: Grammars) -> None:
        async with worker.paired() as stream:
            await self.ask(worker, stream, kept)
            await stream.send(supply(compiled=b""))
            await eventually(lambda: grammars.asked)
            grammars.fail(InvalidRequest("no such", field="compiled_grammar"))
            terminal = (await stream.read()).terminal
            assert (terminal.transfer_id, terminal.outcome) == (7, pb.TRANSFER_OUTCOME_REJECTED)

    async def test_a_cancel_ends_it_and_what_is_supplied_then_is_not_loaded(
        self, worker: Worker, grammars: Grammars, kept: Grammars
    ) -> None:
        async with worker.paired() as stream:
            await self.ask(worker, stream, kept)
            await stream.send(cancel())
            assert (await stream.read()).terminal.outcome == pb.TRANSFER_OUTCOME_CANCELLED
            await stream.send(supply())
            await stream.send(run(9))
            await worker.posts.wait_for(Run)
            assert grammars.asked == [] and worker.servicer.num_loading == 0

    async def test_a_lost_peer_leaves_nothing_waiting(self, worker: Worker, kept: Grammars) -> None:
        async with worker.paired() as stream:
            await self.ask(worker, stream, kept)
        await worker.posts.wait_for(PeerGone)
        assert worker.servicer.num_loading == 0 and worker.posts.of(Run) == []


async def test_bytes_that_are_no_grammar_are_named() -> None:
    """With the real loader."""
    loader = GrammarLoader(None)
    worker = Worker(loader.load, loader.find)
    async with (
        serving(lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(worker.servicer, s)) as worker.address,
        worker.paired() as stream,
    ):
        await stream.send(with_grammar())
        terminal = (await stream.read()).terminal
        assert terminal.outcome == pb.TRANSFER_OUTCOME_REJECTED
        assert terminal.message.startswith("compiled_grammar: ")
    loader.close()


async def test_bytes_beside_no_grammar_are_refused(worker: Worker, grammars: Grammars) -> None:
    command = run()
    command.run.compiled_grammar = b"compiled"
    async with worker.paired() as stream:
        await stream.send(command)
        terminal = (await stream.read()).terminal
        assert terminal.outcome == pb.TRANSFER_OUTCOME_REJECTED
        assert terminal.message.startswith("compiled_grammar: ") and grammars.asked == []


@pytest.mark.parametrize("kind", [0, 99])
async def test_an_unknown_kind_is_answered_and_the_stream_goes_on(worker: Worker, kind: int) -> None:
    command = with_grammar()
    command.run.sampling.grammar.kind = kind  # type: ignore[assignment]
    async with worker.paired() as stream:
        await stream.send(command)
        terminal = (await stream.read()).terminal
        assert (terminal.transfer_id, terminal.outcome) == (7, pb.TRANSFER_OUTCOME_REJECTED)
        assert terminal.message.startswith("grammar: ")
        await stream.send(run(8))
        assert [command.request.transfer_id for command in await worker.posts.wait_for(Run)] == [8]


async def test_a_cancelled_one_ends_at_once_and_only_once(worker: Worker, grammars: Grammars) -> None:
    async with worker.paired() as stream:
        await stream.send(with_grammar())
        await loading(worker)
        await stream.send(cancel())
        terminal = (await stream.read()).terminal
        assert (terminal.transfer_id, terminal.outcome) == (7, pb.TRANSFER_OUTCOME_CANCELLED)
        assert grammars.futures[0].cancelled() and worker.servicer.num_loading == 0
        await stream.send(cancel())
        assert await worker.posts.wait_for(Cancel) == [Cancel("d-inc", 7)]
        assert worker.posts.of(Run) == []


async def test_a_lost_peer_takes_its_own_with_it(worker: Worker, grammars: Grammars) -> None:
    async with worker.paired() as one, worker.paired("other", "decode-1") as two:
        await one.send(with_grammar(1))
        await loading(worker)
        await two.send(with_grammar(1))
        await loading(worker, 2)
        one.cancel()
        assert await worker.posts.wait_for(PeerGone) == [PeerGone("d-inc")]
        assert grammars.futures[0].cancelled() and not grammars.futures[1].cancelled()
        grammars.finish(1)
        assert [command.request.peer for command in await worker.posts.wait_for(Run)] == ["other"]


async def test_the_same_transfer_twice_is_refused(worker: Worker, grammars: Grammars) -> None:
    async with worker.paired() as stream:
        await stream.send(with_grammar())
        await stream.send(with_grammar())
        terminal = (await stream.read()).terminal
        assert terminal.outcome == pb.TRANSFER_OUTCOME_REJECTED and "transfer_id" in terminal.message
        grammars.finish()
        assert len(await worker.posts.wait_for(Run)) == 1


async def test_a_draining_worker_loads_nothing(worker: Worker, grammars: Grammars) -> None:
    async with worker.paired() as stream:
        worker.servicer.draining = True
        await stream.send(with_grammar())
        assert (await stream.read()).terminal.outcome == pb.TRANSFER_OUTCOME_SHORTAGE
        assert grammars.asked == []
