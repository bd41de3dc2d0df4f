"""The decode worker's side of its pairs: one stream to each prefill worker, re-opened for as long as it is wanted.

Pairing is eager (as soon as an address is known), so that no request pays for it; a request for a worker that is not
paired goes elsewhere and starts the pairing.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from common.engine.grammar import Grammar
from common.errors import ManifestMismatch, TandemError
from common.manifest import require_match
from common.pb.tandem.v1 import prefill_pb2 as pb
from common.pb.tandem.v1 import prefill_pb2_grpc
from common.pb.tandem.v1.transport_pb2 import SlotGrant as SlotGrantMessage
from common.pb.tandem.v1.worker_pb2 import Manifest
from common.rpc.channel import open_channel
from common.rpc.convert import logprobs_from_proto, sampled_from_proto, sampling_to_proto
from decode_svc.messages import (
    CancelOut,
    FirstArrived,
    PrefillEnded,
    PrefillOut,
    PrefillProgressed,
    PromptLogprobsArrived,
    RunOut,
)
from decode_svc.sent_grammars import SentGrammars
from kv_store.staging import SlotGrant
from kv_store.transfer.worker import KVTransfer
from kv_store.transport.base import PeerUnreachable

_log = logging.getLogger(__name__)

#: Longest wait between attempts to pair; a mismatch does not heal quickly, so it is tried less often.
MAX_BACKOFF = 2.0
MISMATCH_BACKOFF = 5.0
#: A worker that could not be reached for so long, and that nobody asked for meanwhile, is forgotten.
FORGET_SECONDS = 60.0
#: What a peer that answers nothing may take to say Hello.
HELLO_SECONDS = 10.0


class PrefillPair:
    """One prefill worker under one address."""

    def __init__(
        self,
        address: str,
        *,
        hello: pb.PairHello,
        transfer: KVTransfer,
        post: Callable[[object], None],
        replaced: Callable[[str, str], None],
    ) -> None:
        """`replaced(worker_id, incarnation)` is told of each new pairing before it is used; it may refuse it by
        raising PeerUnreachable."""
        self.address = address
        self._hello = hello
        self._transfer = transfer
        self._post = post
        self._replaced = replaced
        #: Incarnation of the prefill worker that said Hello on this stream, from before the pair can be used.
        self.greeted: str | None = None
        #: The same once the pair can be used. Read by the engine thread.
        self.incarnation: str | None = None
        self.worker_id = ""
        self.refusal = ""
        self.wanted_at = time.monotonic()
        self._outbox: asyncio.Queue[pb.PrefillCommand | None] = asyncio.Queue()
        #: Transfers that run on the present stream, each with its grammar as long as it may be asked for.
        self._live: dict[int, Grammar | None] = {}
        #: On the present stream.
        self._sent_grammars = SentGrammars()
        self._call: Any = None
        #: Why the present call was hung up, if it was.
        self._hung_up = ""

    async def run(self) -> None:
        """Pair, and pair again after each loss, until nobody wants the worker any more."""
        failures = 0
        reached_at = time.monotonic()
        while max(self.wanted_at, reached_at) + FORGET_SECONDS > time.monotonic():
            longest = MAX_BACKOFF
            try:
                await self._session()
            except (grpc.aio.AioRpcError, TandemError, PeerUnreachable, TimeoutError) as error:
                longest = self._note_failure(error)
            finally:
                # Whatever ended the stream: what ran on it must hear of it.
                if self.greeted is not None:
                    failures, reached_at = 0, time.monotonic()
                    self._lose(self.greeted)
            # Kept small enough for the power below to stay a number.
            failures = min(failures + 1, 16)
            await asyncio.sleep(min(longest, 0.05 * 2.0**failures) * random.uniform(0.5, 1.0))

    def _note_failure(self, error: Exception) -> float:
        mismatch = isinstance(error, ManifestMismatch) or (
            isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION
        )
        if not mismatch:
            _log.debug("no pair", extra={"address": self.address, "error": str(error)})
            return MAX_BACKOFF
        reason = error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if reason != self.refusal:
            _log.error("refused a pair with %s: %s", self.address, reason)
        self.refusal = reason
        return MISMATCH_BACKOFF

    async def _session(self) -> None:
        """One stream, from Hello to its end. Returns when the other side ends it; raises when it fails."""
        self._outbox = asyncio.Queue()
        self._outbox.put_nowait(pb.PrefillCommand(hello=self._hello))
        self._hung_up = ""
        self._sent_grammars = SentGrammars()
        async with open_channel(self.address) as channel:
            call = self._call = prefill_pb2_grpc.PrefillStub(channel).Run(self._commands())
            try:
                events = aiter(call)
                async with asyncio.timeout(HELLO_SECONDS):
                    first = await anext(events, None)
                    if first is None or first.WhichOneof("message") != "hello":
                        raise PeerUnreachable(f"{self.address} did not say Hello")
                    await self._pair(first.hello)
                async for event in events:
                    self._handle(event)
            except asyncio.CancelledError:
                # Reading from a call that was hung up ends like this, too; that must not end the pair.
                task = asyncio.current_task()
                if not self._hung_up or (task is not None and task.cancelling()):
                    raise
                raise PeerUnreachable(self._hung_up) from None
            finally:
                call.cancel()
                self._call = None
                # gRPC does not end the request side of a call that the other side has ended.
                self._outbox.put_nowait(None)

    def hang_up(self, reason: str) -> None:
        """End the stream; what runs on it fails and the pair is made anew."""
        _log.warning("hanging up on a prefill worker", extra={"prefill_worker": self.worker_id, "reason": reason})
        if self._call is not None:
            self._hung_up = reason
            self._call.cancel()

    async def _commands(self) -> AsyncIterator[pb.PrefillCommand]:
        outbox = self._outbox
        while (command := await outbox.get()) is not None:
            yield command

    async def _pair(self, theirs: pb.PairHello) -> None:
        require_match(self._hello.manifest, theirs.manifest, peer=theirs.worker_id)
        self._replaced(theirs.worker_id, theirs.incarnation)
        self.worker_id = theirs.worker_id
        self.greeted = theirs.incarnation
        try:
            await asyncio.wrap_future(self._transfer.connect(theirs.incarnation, theirs.transport, receive=True))
        except ValueError as error:
            raise ManifestMismatch(f"cannot pair with {theirs.worker_id}: {error}", field="transport") from error
        self.refusal = ""
        self.incarnation = theirs.incarnation
        _log.info("paired", extra={"prefill_worker": theirs.worker_id, "transport": theirs.transport.transport})

    def _lose(self, incarnation: str) -> None:
        """The stream is over: what ran on it has failed, and its slots wait for proof that nobody writes to them."""
        self.greeted = self.incarnation = None
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            _log.info("unpaired", extra={"prefill_worker": self.worker_id})
        else:
            extra = {"prefill_worker": self.worker_id, "transfers": len(self._live)}
            _log.warning("lost a prefill worker", extra=extra)
        for transfer_id in self._live:
            self._post(PrefillEnded(transfer_id, ok=False, message="the prefill worker is gone"))
        self._live.clear()
        self._transfer.disconnect(incarnation)

    # --- out ---------------------------------------------------------------------------------------

    def run_remote(self, out: RunOut) -> None:
        if self.incarnation is None:
            self._post(PrefillEnded(out.transfer_id, ok=False, message="the prefill worker is gone"))
            return
        run = _to_run(out)
        self._live[out.transfer_id] = None
        if out.grammar is not None:
            self._add_grammar(run, out)
        self._outbox.put_nowait(pb.PrefillCommand(run=run))

    def _add_grammar(self, run: pb.RunRequest, out: RunOut) -> None:
        """Whole the first time, then by its digest."""
        spec, grammar = out.params.grammar, out.grammar
        assert spec is not None and grammar is not None, f"a grammar of no kind for transfer {out.transfer_id}"
        if self._sent_grammars.note(spec.kind, grammar):
            run.grammar_digest = grammar.digest
            self._live[out.transfer_id] = grammar
        else:
            run.compiled_grammar = grammar.serialized

    def cancel(self, transfer_id: int) -> None:
        if transfer_id in self._live:
            self._outbox.put_nowait(pb.PrefillCommand(cancel=pb.CancelTransfer(transfer_id=transfer_id)))

    def send_credits(self, grants: Iterable[SlotGrant]) -> None:
        messages = [SlotGrantMessage(slot=grant.slot, generation=grant.generation) for grant in grants]
        self._outbox.put_nowait(pb.PrefillCommand(credit=pb.Credit(grants=messages)))

    # --- in ----------------------------------------------------------------------------------------

    def _handle(self, event: pb.PrefillEvent) -> None:
        match event.WhichOneof("message"):
            case "first":
                self._post(_from_first(event.first))
            case "prompt_logprobs":
                self._post(_from_prompt_logprobs(event.prompt_logprobs))
            case "progress":
                self._post(PrefillProgressed(event.progress.transfer_id))
            case "grammar_wanted":
                self._supply_grammar(event.grammar_wanted.transfer_id)
            case "terminal":
                self._ended(event.terminal)
            case kind:
                _log.warning("ignored an event", extra={"kind": kind, "prefill_worker": self.worker_id})

    def _supply_grammar(self, transfer_id: int) -> None:
        """The worker does not keep what it was sent the digest of. Once: a worker that asks again has a bug."""
        grammar = self._live.get(transfer_id)
        if grammar is None:
            _log.warning("a grammar is wanted that was not left out", extra={"prefill_worker": self.worker_id})
            return
        self._live[transfer_id] = None
        supplied = pb.CompiledGrammar(transfer_id=transfer_id, compiled_grammar=grammar.serialized)
        self._outbox.put_nowait(pb.PrefillCommand(grammar=supplied))
        # A sign of life.
        self._post(PrefillProgressed(transfer_id))

    def _ended(self, terminal: pb.Terminal) -> None:
        self._live.pop(terminal.transfer_id, None)
        self._post(_from_terminal(terminal))
        # After the engine knows the figures: the receive may end in this very moment.
        if terminal.outcome == pb.TRANSFER_OUTCOME_OK:
            self._transfer.seal(terminal.transfer_id, terminal.messages, terminal.bytes)


class PrefillPairs:
    """All pairs of this decode worker, by address."""

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        manifest: Manifest,
        transfer: KVTransfer,
        post: Callable[[object], None],
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._manifest = manifest
        self._transfer = transfer
        self._post = post
        self._pairs: dict[str, PrefillPair] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Last known incarnation by stable worker id.
        self._incarnations: dict[str, str] = {}

    @property
    def paired(self) -> list[str]:
        return sorted(pair.worker_id for pair in self._pairs.values() if pair.incarnation is not None)

    @property
    def refused(self) -> list[str]:
        return sorted(f"{pair.address}: {pair.refusal}" for pair in self._pairs.values() if pair.refusal)

    def find_peer(self, address: str) -> str | None:
        """Incarnation of the prefill worker paired under `address`. May be called from any thread."""
        pair = self._pairs.get(address)
        return None if pair is None else pair.incarnation

    def want(self, address: str) -> None:
        """Pair with the prefill worker under `address`, if that is not so or under way."""
        pair = self._pairs.get(address)
        if pair is not None:
            pair.wanted_at = time.monotonic()
            return
        hello = pb.PairHello(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            manifest=self._manifest,
            transport=self._transfer.local_peer(),
        )
        pair = PrefillPair(address, hello=hello, transfer=self._transfer, post=self._post, replaced=self._replaced)
        self._pairs[address] = pair
        task = asyncio.create_task(pair.run(), name=f"pair {address}")
        self._tasks[address] = task
        task.add_done_callback(lambda _: self._forget(address))

    def _forget(self, address: str) -> None:
        task = self._tasks.pop(address, None)
        self._pairs.pop(address, None)
        if task is not None and not task.cancelled() and (error := task.exception()) is not None:
            _log.error("pairing with %s failed unexpectedly", address, exc_info=error)

    def _replaced(self, worker_id: str, incarnation: str) -> None:
        """A stable id under a new incarnation: whoever supervises it has seen the old process end."""
        old = self._incarnations.get(worker_id)
        if old is not None and old != incarnation:
            for pair in self._pairs.values():
                if pair.greeted == old:
                    # Two workers under one id, or the old one's stream is not yet known to be broken: no proof.
                    raise PeerUnreachable(f"{worker_id} is still paired under {pair.address}")
            self._transfer.prove_dead(old)
        self._incarnations[worker_id] = incarnation

    def dispatch(self, out: PrefillOut) -> None:
        """Carry an engine output to the pair it is for."""
        pair = self._pairs.get(out.target.address)
        match out:
            case RunOut() if pair is None:
                self._post(PrefillEnded(out.transfer_id, ok=False, message="the prefill worker is gone"))
            case RunOut() if pair is not None:
                pair.run_remote(out)
            case CancelOut() if pair is not None:
                pair.cancel(out.transfer_id)

    def send_credits(self, incarnation: str, grants: Sequence[SlotGrant]) -> None:
        """Credits that the transfer thread grants to a peer. Those of a lost pair are void with it."""
        for pair in self._pairs.values():
            if pair.greeted == incarnation:
                pair.send_credits(grants)

    def drop_peer(self, incarnation: str, reason: str) -> None:
        """The transport has lost this peer: end its stream, so that it pairs anew."""
        for pair in self._pairs.values():
            if pair.greeted == incarnation:
                pair.hang_up(reason)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _to_run(out: RunOut) -> pb.RunRequest:
    return pb.RunRequest(
        transfer_id=out.transfer_id,
        request_id=out.request_id,
        prompt_ids=out.prompt_ids,
        first_token=out.first_token,
        first_choices=out.first_choices,
        sampling=sampling_to_proto(out.params),
        cache_salt=out.cache_salt,
        traceparent=out.traceparent,
    )


def _from_first(first: pb.First) -> FirstArrived:
    tokens = [
        (t.choice, sampled_from_proto(t.token_id, t.logprobs if t.HasField("logprobs") else None)) for t in first.tokens
    ]
    return FirstArrived(first.transfer_id, tokens, first.cached_tokens)


def _from_prompt_logprobs(scores: pb.PromptLogprobs) -> PromptLogprobsArrived:
    entries = [logprobs_from_proto(entry) for entry in scores.entries]
    return PromptLogprobsArrived(scores.transfer_id, scores.first_position, entries)


def _from_terminal(terminal: pb.Terminal) -> PrefillEnded:
    return PrefillEnded(
        terminal.transfer_id,
        ok=terminal.outcome == pb.TRANSFER_OUTCOME_OK,
        message=terminal.message,
        cached_tokens=terminal.cached_tokens,
        computed_tokens=terminal.computed_tokens,
        prefill_seconds=terminal.prefill_seconds,
        transfer_seconds=terminal.transfer_seconds,
        compute_ended=time.monotonic() - terminal.since_compute_seconds,
    )
