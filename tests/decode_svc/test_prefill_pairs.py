"""Pairs of a decode worker with real prefill servicers, over real gRPC, and what becomes of them."""

import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest
from opentelemetry import trace

from common.engine.grammar import Grammar
from common.pb.tandem.v1 import prefill_pb2 as pb
from common.pb.tandem.v1 import prefill_pb2_grpc
from common.sampling import Candidate, GrammarKind, GrammarSpec, SampledToken, SamplingParams, TokenLogprobs
from decode_svc.messages import (
    CancelOut,
    FirstArrived,
    PrefillEnded,
    PrefillProgressed,
    PromptLogprobsArrived,
    RunOut,
)
from decode_svc.prefill_pairs import PrefillPairs
from decode_svc.request import PrefillTarget
from decode_svc.sent_grammars import SentGrammars
from kv_store.staging import SlotGrant
from prefill_svc.request import Cancel, Ended, FirstTokens, GrammarWanted, PeerGone, Progressed, PromptLogprobs, Run
from prefill_svc.service import PrefillServicer
from tests.factories.engines import FakePairing, compile_regex
from tests.factories.rpc import Posts, eventually, make_manifest, serving

PARAMS = SamplingParams(seed=5, max_tokens=3)
GRAMMARS = [compile_regex("a+"), compile_regex("b+")]


class CountingLoader:
    """Keeps grammars until it is told to forget them; says how many came whole."""

    def __init__(self) -> None:
        self.num_loaded = 0
        self.kept: dict[bytes, Grammar] = {}

    def load(self, kind: GrammarKind, serialized: bytes) -> "Future[Grammar]":
        [grammar] = [grammar for grammar in GRAMMARS if grammar.serialized == serialized]
        self.num_loaded += 1
        self.kept[grammar.digest] = grammar
        loaded: Future[Grammar] = Future()
        loaded.set_result(grammar)
        return loaded

    def find(self, kind: GrammarKind, digest: bytes) -> "Future[Grammar | None]":
        found: Future[Grammar | None] = Future()
        found.set_result(self.kept.get(digest))
        return found


class PrefillSide:
    """A prefill worker without an engine."""

    def __init__(self, worker_id: str = "prefill-0", incarnation: str = "p-inc", **manifest: Any) -> None:
        self.posts = Posts()
        self.transfer = FakePairing(f"agent of {incarnation}")
        self.incarnation = incarnation
        self.loader = CountingLoader()
        self.servicer = PrefillServicer(
            worker_id=worker_id,
            incarnation=incarnation,
            manifest=make_manifest(**manifest),
            transfer=cast(Any, self.transfer),
            post=self.posts,
            load_grammar=self.loader.load,
            find_grammar=self.loader.find,
            tracer=trace.NoOpTracer(),
        )

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        async with serving(lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(self.servicer, s), port) as address:
            yield address


class DecodeSide:
    def __init__(self) -> None:
        self.posts = Posts()
        self.transfer = FakePairing("decode-agent")
        self.pairs = PrefillPairs(
            worker_id="decode-0",
            incarnation="d-inc",
            manifest=make_manifest(),
            transfer=cast(Any, self.transfer),
            post=self.posts,
        )

    async def pair(self, address: str) -> str:
        self.pairs.want(address)
        await eventually(lambda: self.pairs.find_peer(address) is not None)
        found = self.pairs.find_peer(address)
        assert found is not None
        return found


@pytest.fixture
async def decode() -> AsyncIterator[DecodeSide]:
    made = DecodeSide()
    yield made
    await made.pairs.close()
    assert made.pairs.paired == []


@pytest.fixture
async def prefill() -> PrefillSide:
    return PrefillSide()


class Answering(prefill_pb2_grpc.PrefillServicer):
    """Says one thing, whatever it hears."""

    def __init__(self, answer: pb.PrefillEvent, heard: list[object]) -> None:
        self._answer = answer
        self._heard = heard

    async def Run(self, request_iterator: AsyncIterator[pb.PrefillCommand], context: Any) -> AsyncIterator[Any]:
        async for command in request_iterator:
            self._heard.append(command)
            yield self._answer


def answering(
    answer: pb.PrefillEvent, heard: list[object] | None = None
) -> contextlib.AbstractAsyncContextManager[str]:
    servicer = Answering(answer, [] if heard is None else heard)
    return serving(lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, s))


def run_out(address: str, transfer_id: int = 1) -> RunOut:
    return RunOut(PrefillTarget("p", address), transfer_id, "r", (5, 6, 7), 1, (0,), PARAMS, "salt", "tp")


def run_with(grammar: Grammar, address: str, transfer_id: int = 1) -> RunOut:
    params = replace(PARAMS, grammar=GrammarSpec(GrammarKind.EBNF, "some"))
    return replace(run_out(address, transfer_id), params=params, grammar=grammar)


class TestPairing:
    async def test_a_wanted_worker_is_paired_by_its_incarnation(self, decode: DecodeSide, prefill: PrefillSide) -> None:
        async with prefill.serving() as address:
            assert await decode.pair(address) == "p-inc"
            decode.pairs.want(address)
            assert decode.pairs.paired == ["prefill-0"] and decode.pairs.refused == []
            assert decode.transfer.calls == [("connect", "p-inc", "agent of p-inc", True)]
            assert prefill.transfer.calls == [("connect", "d-inc", "decode-agent", False)]

    async def test_a_mismatch_is_listed_on_both_sides_in_words(self, decode: DecodeSide) -> None:
        other = PrefillSide(weights_fingerprint="other")
        async with other.serving() as address:
            decode.pairs.want(address)
            await eventually(lambda: decode.pairs.refused)
            (refusal,) = decode.pairs.refused
            assert refusal.startswith(f"{address}: ")
            assert "weights_fingerprint: 'other' here, 'w' there" in refusal
            assert "weights_fingerprint: 'other' here, 'w' there" in other.servicer.refused["decode-0"]
            assert decode.pairs.paired == [] and decode.pairs.find_peer(address) is None
            assert decode.transfer.calls == [] == other.transfer.calls

    async def test_a_mismatch_that_only_the_decode_side_sees_is_listed_too(self, decode: DecodeSide) -> None:
        """As with a prefill worker of another version, which compares less."""
        other = pb.PairHello(worker_id="p", incarnation="i", manifest=make_manifest(model="other"))
        async with answering(pb.PrefillEvent(hello=other)) as address:
            decode.pairs.want(address)
            await eventually(lambda: decode.pairs.refused)
            assert "model: 'tiny' here, 'other' there" in decode.pairs.refused[0]
            assert decode.transfer.calls == []

    async def test_who_does_not_say_hello_is_not_paired(self, decode: DecodeSide) -> None:
        hellos: list[object] = []
        async with answering(pb.PrefillEvent(progress=pb.Progress(transfer_id=1)), hellos) as address:
            decode.pairs.want(address)
            await eventually(lambda: len(hellos) >= 2)
            assert decode.pairs.find_peer(address) is None
            assert decode.posts.all == [] == decode.pairs.refused

    async def test_transports_that_do_not_fit_are_refused_in_words_and_tried_again(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        decode.transfer.refuse = ValueError("slot_bytes: 64 of p-inc hold no token of 4096 bytes")
        async with prefill.serving() as address:
            decode.pairs.want(address)
            await eventually(lambda: decode.pairs.refused)
            assert "64 of p-inc hold no token" in decode.pairs.refused[0]
            assert decode.pairs.find_peer(address) is None
            decode.transfer.refuse = None
            assert await decode.pair(address) == "p-inc"
            assert decode.pairs.refused == []

    async def test_a_worker_that_is_not_there_yet_is_paired_when_it_comes(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        async with prefill.serving() as address:
            pass
        decode.pairs.want(address)
        async with prefill.serving(int(address.split(":")[1])):
            assert await decode.pair(address) == "p-inc"

    async def test_a_restarted_worker_is_paired_anew_and_its_former_self_is_known_to_be_dead(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            decode.pairs.dispatch(run_out(address))
            await prefill.posts.wait_for(Run)
        assert await decode.posts.wait_for(PrefillEnded) == [
            PrefillEnded(1, ok=False, message="the prefill worker is gone")
        ]
        assert decode.pairs.find_peer(address) is None
        restarted = PrefillSide(incarnation="p-inc-2")
        async with restarted.serving(int(address.split(":")[1])):
            assert await decode.pair(address) == "p-inc-2"
        calls = [call[:2] for call in decode.transfer.calls]
        assert calls[:4] == [
            ("connect", "p-inc"),
            ("disconnect", "p-inc"),
            ("prove_dead", "p-inc"),
            ("connect", "p-inc-2"),
        ]

    async def test_the_same_incarnation_comes_back_after_a_broken_stream_and_is_not_called_dead(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            prefill.servicer.drop_peer("d-inc", "a write failed")
            await prefill.posts.wait_for(PeerGone)
            await eventually(lambda: len(decode.transfer.calls) == 3)
            assert await decode.pair(address) == "p-inc"
        assert [call[0] for call in decode.transfer.calls[:3]] == ["connect", "disconnect", "connect"]

    async def test_two_live_workers_under_one_id_are_no_proof_of_a_death(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        twin = PrefillSide(incarnation="twin-inc")
        async with prefill.serving() as address, twin.serving() as other:
            await decode.pair(address)
            decode.pairs.want(other)
            # It has been seen, and let go of.
            await twin.posts.wait_for(PeerGone)
            assert decode.pairs.find_peer(other) is None
            assert decode.pairs.find_peer(address) == "p-inc"
            assert all(call[0] != "prove_dead" for call in decode.transfer.calls)

    async def test_a_peer_that_the_transport_lost_is_hung_up_on_and_paired_anew(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            decode.pairs.dispatch(run_out(address))
            await prefill.posts.wait_for(Run)
            decode.pairs.drop_peer("unknown", "never heard of")
            decode.pairs.drop_peer("p-inc", "it cannot be reached")
            ended = await decode.posts.wait_for(PrefillEnded)
            assert [(e.transfer_id, e.ok) for e in ended] == [(1, False)]
            assert await prefill.posts.wait_for(PeerGone) == [PeerGone("d-inc")]
            await eventually(lambda: len(decode.transfer.calls) == 3)
            assert await decode.pair(address) == "p-inc"

    async def test_closing_ends_every_attempt(self, decode: DecodeSide, prefill: PrefillSide) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            decode.pairs.want("127.0.0.1:1")
            await decode.pairs.close()
            assert decode.pairs.paired == []
            assert await prefill.posts.wait_for(PeerGone) == [PeerGone("d-inc")]


class TestTraffic:
    async def test_a_run_and_its_events(self, decode: DecodeSide, prefill: PrefillSide) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            decode.pairs.dispatch(run_out(address))
            (run,) = await prefill.posts.wait_for(Run)
            request = run.request
            assert (request.peer, request.transfer_id, request.request_id) == ("d-inc", 1, "r")
            assert (request.prompt_ids, request.first_token, request.first_choices) == ((5, 6, 7), 1, (0,))
            assert (request.params, request.cache_salt, request.traceparent) == (PARAMS, "salt", "tp")
            prefill.servicer.deliver(
                [
                    Progressed("d-inc", 1, 2),
                    FirstTokens("d-inc", 1, [(0, SampledToken(9))]),
                    Ended("d-inc", 1, "ok", "", 4, 400, 1, 2, 0.5, 0.25, 0.125),
                ]
            )
            (ended,) = await decode.posts.wait_for(PrefillEnded)
            assert decode.posts.all[:2] == [PrefillProgressed(1), FirstArrived(1, [(0, SampledToken(9))])]
            assert (ended.ok, ended.cached_tokens, ended.computed_tokens) == (True, 1, 2)
            assert (ended.prefill_seconds, ended.transfer_seconds) == (0.5, 0.125)
            # The engine hears of the end before the transfer can complete.
            assert decode.transfer.calls[-1] == ("seal", 1, 4, 400)

    async def test_prompt_log_probabilities_come_before_the_first_token(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        params = replace(PARAMS, prompt_logprobs=1)
        entries = tuple(TokenLogprobs(Candidate(i, -0.5), (Candidate(3, -0.25),)) for i in (6, 7))
        async with prefill.serving() as address:
            await decode.pair(address)
            decode.pairs.dispatch(replace(run_out(address), params=params))
            (run,) = await prefill.posts.wait_for(Run)
            assert run.request.params == params
            prefill.servicer.deliver(
                [
                    PromptLogprobs("d-inc", 1, 1, entries[:1]),
                    PromptLogprobs("d-inc", 1, 2, entries[1:]),
                    FirstTokens("d-inc", 1, [(0, SampledToken(9))]),
                    Ended("d-inc", 1, "ok"),
                ]
            )
            await decode.posts.wait_for(PrefillEnded)
            assert decode.posts.all[:3] == [
                PromptLogprobsArrived(1, 1, list(entries[:1])),
                PromptLogprobsArrived(1, 2, list(entries[1:])),
                FirstArrived(1, [(0, SampledToken(9))]),
            ]

    @pytest.mark.parametrize("outcome", ["cancelled", "shortage", "rejected", "failed"])
    async def test_what_did_not_end_well_is_not_sealed(
        self, decode: DecodeSide, prefill: PrefillSide, outcome: str
    ) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            decode.pairs.dispatch(run_out(address))
            await prefill.posts.wait_for(Run)
            prefill.servicer.deliver([Ended("d-inc", 1, outcome, "why")])
            (ended,) = await decode.posts.wait_for(PrefillEnded)
            assert (ended.transfer_id, ended.ok, ended.message) == (1, False, "why")
            assert all(call[0] != "seal" for call in decode.transfer.calls)

    async def test_a_cancel_follows_its_run_and_not_its_terminal(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            for transfer_id in (1, 2):
                decode.pairs.dispatch(run_out(address, transfer_id))
            await prefill.posts.wait_for(Run, 2)
            prefill.servicer.deliver([Ended("d-inc", 1, "ok")])
            await decode.posts.wait_for(PrefillEnded)
            for transfer_id in (1, 2):
                decode.pairs.dispatch(CancelOut(PrefillTarget("p", address), transfer_id))
            assert await prefill.posts.wait_for(Cancel) == [Cancel("d-inc", 2)]

    async def test_a_run_for_a_worker_that_is_not_paired_fails_at_once(self, decode: DecodeSide) -> None:
        decode.pairs.dispatch(run_out("127.0.0.1:1", 3))
        decode.pairs.dispatch(CancelOut(PrefillTarget("p", "127.0.0.1:1"), 3))
        decode.pairs.want("127.0.0.1:1")
        decode.pairs.dispatch(run_out("127.0.0.1:1", 4))
        assert [(e.transfer_id, e.ok) for e in decode.posts.of(PrefillEnded)] == [(3, False), (4, False)]

    async def test_credits_go_to_the_pair_they_are_for(self, decode: DecodeSide, prefill: PrefillSide) -> None:
        other = PrefillSide("prefill-1", "other-inc")
        async with prefill.serving() as address, other.serving() as other_address:
            await decode.pair(address)
            await decode.pair(other_address)
            assert decode.pairs.paired == ["prefill-0", "prefill-1"]
            decode.pairs.send_credits("other-inc", [SlotGrant(1, 2), SlotGrant(3, 1)])
            decode.pairs.send_credits("nobody", [SlotGrant(0, 1)])
            decode.pairs.send_credits("p-inc", [SlotGrant(2, 2)])
            await eventually(lambda: len(prefill.transfer.calls) == len(other.transfer.calls) == 2)
            assert prefill.transfer.calls[1] == ("add_credits", "d-inc", (SlotGrant(2, 2),))
            assert other.transfer.calls[1] == ("add_credits", "d-inc", (SlotGrant(1, 2), SlotGrant(3, 1)))


class TestGrammars:
    async def test_each_travels_whole_once_on_a_stream(self, decode: DecodeSide, prefill: PrefillSide) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            for transfer_id in range(6):
                decode.pairs.dispatch(run_with(GRAMMARS[transfer_id % 2], address, transfer_id))
            runs = await prefill.posts.wait_for(Run, 6)
            assert [run.request.grammar for run in runs] == GRAMMARS * 3
            assert prefill.loader.num_loaded == 2 and decode.posts.all == []

    async def test_one_that_is_not_kept_any_more_is_sent_again(self, decode: DecodeSide, prefill: PrefillSide) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            for transfer_id in range(4):
                decode.pairs.dispatch(run_with(GRAMMARS[0], address, transfer_id))
                runs = await prefill.posts.wait_for(Run, transfer_id + 1)
                if transfer_id == 1:
                    prefill.loader.kept.clear()
            assert [run.request.grammar for run in runs] == [GRAMMARS[0]] * 4
            assert prefill.loader.num_loaded == 2
            # Asked for once, and that counts as a sign of life.
            assert decode.posts.all == [PrefillProgressed(2)]

    async def test_a_restarted_worker_is_sent_it_whole(self, decode: DecodeSide, prefill: PrefillSide) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            decode.pairs.dispatch(run_with(GRAMMARS[0], address))
            await prefill.posts.wait_for(Run)
        await decode.posts.wait_for(PrefillEnded)
        restarted = PrefillSide(incarnation="p-inc-2")
        async with restarted.serving(int(address.split(":")[1])):
            await decode.pair(address)
            decode.pairs.dispatch(run_with(GRAMMARS[0], address, 2))
            [run] = await restarted.posts.wait_for(Run)
            assert run.request.grammar is GRAMMARS[0] and restarted.loader.num_loaded == 1
            assert decode.posts.of(PrefillProgressed) == []

    async def test_what_was_not_left_out_is_not_sent_again(self, decode: DecodeSide, prefill: PrefillSide) -> None:
        """By a worker with a bug; no wish of it leads in a circle."""
        async with prefill.serving() as address:
            await decode.pair(address)
            decode.pairs.dispatch(run_with(GRAMMARS[0], address, 1))
            decode.pairs.dispatch(run_out(address, 2))
            await prefill.posts.wait_for(Run, 2)
            for transfer_id in (1, 2, 3):
                prefill.servicer.deliver([GrammarWanted("d-inc", transfer_id)])
            prefill.servicer.deliver([Progressed("d-inc", 1, 2)])
            await decode.posts.wait_for(PrefillProgressed)
            assert decode.posts.all == [PrefillProgressed(1)] and prefill.loader.num_loaded == 1

    async def test_one_that_is_wanted_as_its_request_ends_is_not_sent(
        self, decode: DecodeSide, prefill: PrefillSide
    ) -> None:
        async with prefill.serving() as address:
            await decode.pair(address)
            for transfer_id in (1, 2):
                decode.pairs.dispatch(run_with(GRAMMARS[0], address, transfer_id))
            await prefill.posts.wait_for(Run, 2)
            prefill.servicer.deliver([Ended("d-inc", 2, "cancelled"), GrammarWanted("d-inc", 2)])
            prefill.servicer.deliver([Progressed("d-inc", 1, 2)])
            await decode.posts.wait_for(PrefillProgressed)
            assert prefill.loader.num_loaded == 1


class TestSentGrammars:
    def test_kinds_and_grammars_are_told_apart(self) -> None:
        sent = SentGrammars()
        keys = [(kind, grammar) for kind in GrammarKind for grammar in GRAMMARS]
        assert not any(sent.note(*key) for key in keys)
        assert all(sent.note(*key) for key in keys)

    def test_the_one_that_was_not_used_for_longest_is_forgotten(self) -> None:
        sent, (one, two), kind = SentGrammars(2), GRAMMARS, GrammarKind.EBNF
        assert [sent.note(kind, grammar) for grammar in (one, two, one)] == [False, False, True]
        assert not sent.note(GrammarKind.JSON_SCHEMA, one) and len(sent) == 2
        assert sent.note(kind, one) and not sent.note(kind, two)


async def test_only_who_was_not_let_go_of_is_called_lost(
    prefill: PrefillSide, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who stops the system looks for no fault."""
    caplog.set_level(logging.INFO, "decode_svc.prefill_pairs")
    lost, leaving = DecodeSide(), DecodeSide()
    async with prefill.serving() as address:
        await leaving.pair(address)
        await leaving.pairs.close()
        assert [record.levelname for record in caplog.records if record.msg == "unpaired"] == ["INFO"]
        assert not any(record.levelno >= logging.WARNING for record in caplog.records)
        await lost.pair(address)
    await eventually(lambda: lost.pairs.paired == [])
    assert [record.msg for record in caplog.records if record.levelno >= logging.WARNING] == ["lost a prefill worker"]
    await lost.pairs.close()
