"""Stand-ins for what an engine drives, so that engines run in a test step by step, on one thread and by the book.

The fake runner's "KV" is the (token, position) that was written to each slot; its logits are a pure function of the
tokens that it finds in the blocks it is given. So whatever goes wrong with blocks, prefixes, forks, preemption or
transfers shows: as a failed check here, or as a token that differs from `reference`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
import xgrammar
from torch import Tensor

from common.engine.batch import SequenceChunk
from common.engine.grammar import Grammar, GrammarState, MaskFiller
from common.engine.grammar.surrogates import SurrogateRule
from common.engine.kv_cache import KVSpec
from common.engine.sampler import Sampler, SampleRow
from common.engine.sampler.logprobs import token_logprobs
from common.pb.tandem.v1.transport_pb2 import TransportPeer
from common.sampling import FinishReason, SampledToken, SamplingParams, TokenLogprobs
from kv_store.staging import SlotGrant, StagingCounts
from kv_store.transfer.counters import Drop, TransferCounters
from kv_store.transfer.events import Outcome, ReceiveFinished, SendFinished, TransferEvent

VOCAB = 24
EOS = 1
SAMPLER = Sampler(VOCAB, (EOS,))
MASKS = MaskFiller()
#: Token i spells the i-th letter; the end token and token 0 spell nothing.
LETTERS = "..abcdefghijklmnopqrstuv"


@lru_cache(maxsize=1 << 16)
def logits_after(history: tuple[int, ...]) -> Tensor:
    """fp32 [VOCAB]: spread out, and different for any two histories."""
    digest = blake2b(np.asarray(history, dtype="<u4").tobytes(), digest_size=VOCAB * 2).digest()
    return torch.from_numpy(np.frombuffer(digest, dtype="<u2").astype(np.float32) / 8192.0)


@lru_cache(maxsize=32)
def compile_regex(regex: str) -> Grammar:
    """A grammar over LETTERS."""
    tokens = [b"" if letter == "." else letter.encode() for letter in LETTERS]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[EOS])
    compiled = xgrammar.GrammarCompiler(info).compile_regex(regex)
    return Grammar(compiled, str(compiled.serialize_json()).encode(), SurrogateRule.of(tokens, VOCAB))


def no_grammar(*_: object) -> "Future[Grammar]":
    """Compiles, or loads, grammars where there are none."""
    raise AssertionError("nothing here has a grammar")


def next_token(
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    choice: int,
    state: GrammarState | None = None,
) -> SampledToken:
    """What follows `output`, which has led to `state` in the request's grammar, by definition."""
    words = None if state is None else np.empty(state.num_words, dtype=np.int32)
    allowed = words if state is not None and words is not None and state.fill(words) else None
    row = SampleRow(params, choice, len(output), prompt, output, allowed)
    return SAMPLER.sample(logits_after((*prompt, *output))[None], [row])[0]


def first_tokens(
    prompt: Sequence[int], params: SamplingParams, choices: Sequence[int], grammar: Grammar | None = None
) -> list[tuple[int, SampledToken]]:
    """What a prefill worker draws."""
    state = None if grammar is None else grammar.start()
    return [(choice, next_token(prompt, (), params, choice, state)) for choice in choices]


def reference(
    prompt: Sequence[int],
    params: SamplingParams,
    choice: int,
    max_request_tokens: int,
    grammar: Grammar | None = None,
) -> tuple[list[int], FinishReason]:
    """The whole output of one choice and why it ends, whatever happens on the way."""
    output: list[int] = []
    state = None if grammar is None else grammar.start()
    while True:
        token = next_token(prompt, output, params, choice, state).token_id
        output.append(token)
        if state is not None:
            state.accept(token)
            if state.terminated:
                return output, FinishReason.STOP
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) >= params.max_tokens or len(prompt) + len(output) >= max_request_tokens:
            return output, FinishReason.LENGTH


def prompt_scores(prompt: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """What is told of a prompt's tokens from the second on, by definition."""
    return [token_logprobs(logits_after(tuple(prompt[:i])), prompt[i], num_top) for i in range(1, len(prompt))]


class FakeKVCache:
    """(token, position) by flat slot."""

    def __init__(self, num_blocks: int, block_size: int, num_layers: int = 3) -> None:
        self.spec = KVSpec(num_layers, 1, 8, torch.float32, block_size, num_blocks)
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        #: Slots that a peer may write at this moment: the engine must leave them alone.
        self.receiving: set[int] = set()

    def copy_block(self, source: int, target: int) -> None:
        size = self.spec.block_size
        for offset in range(size):
            assert target * size + offset not in self.receiving, f"copied into block {target} during a transfer"
            self.slots[target * size + offset] = self.slots[source * size + offset]

    def write(self, slot: int, token: int, position: int) -> None:
        assert slot not in self.receiving, f"position {position} computed into slot {slot} during a transfer"
        self.slots[slot] = (token, position)

    def history(self, block_table: Sequence[int], end: int) -> tuple[int, ...]:
        """Tokens whose KV lies at positions [0, end)."""
        size = self.spec.block_size
        found = [self.slots[block_table[p // size] * size + p % size] for p in range(end)]
        for position, entry in enumerate(found):
            assert entry is not None and entry[1] == position, f"position {position} of {end}: {entry} in {block_table}"
        return tuple(entry[0] for entry in found if entry is not None)


class FakeRunner:
    """`ModelRunner` over a `FakeKVCache`."""

    def __init__(self, kv_cache: FakeKVCache) -> None:
        self.kv_cache = kv_cache
        #: Chunks of each call, for tests that look at batches.
        self.calls: list[list[SequenceChunk]] = []

    def run_scored(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int, torch.cuda.Event | None], None] | None = None
    ) -> tuple[Tensor, list[list[TokenLogprobs]]]:
        assert chunks and all(len(chunk.token_ids) for chunk in chunks), "an empty batch or chunk"
        self.calls.append(list(chunks))
        size = self.kv_cache.spec.block_size
        histories = [self.kv_cache.history(c.block_table, c.start) + tuple(c.token_ids) for c in chunks]
        written: set[int] = set()
        for chunk in chunks:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                slot = chunk.block_table[position // size] * size + position % size
                assert slot not in written, f"slot {slot} written twice in one step"
                written.add(slot)
                self.kv_cache.write(slot, token, position)
        if on_layer is not None:
            for layer in range(self.kv_cache.spec.num_layers):
                on_layer(layer, None)
        rows = [logits_after(h) for h, c in zip(histories, chunks, strict=True) if c.wants_logits]
        scores = [
            [token_logprobs(logits_after(h[: c.start + i]), target, c.num_top) for i, target in enumerate(c.targets, 1)]
            for h, c in zip(histories, chunks, strict=True)
        ]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB), scores


@dataclass
class FakeSend:
    """What was announced of one transfer, and how much of it was read."""

    transfer_id: int
    peer: str
    num_prompt_tokens: int
    first_token: int
    #: Flat slot of each announced position, in order.
    slots: list[int] = field(default_factory=list)
    #: Layers ready by chunk id, and the positions that chunk ends before.
    ready: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    aborted: bool = False

    @property
    def begun(self) -> int:
        return self.first_token + len(self.slots)


@dataclass
class FakeReceive:
    transfer_id: int
    peer: str
    first_token: int
    slots: Sequence[int]
    landed: set[int] = field(default_factory=set)
    sealed: bool = False

    @property
    def complete(self) -> bool:
        return len(self.landed) == len(self.slots)


class FakeTransfer:
    """`KVTransfer` whose messages move, and whose transfers end, when the test says so.

    `events` are for the test to hand to the engine, by `take_event`: until then the slots of a receive count as
    being written, and those of a send as being read.
    """

    def __init__(self, kv_cache: FakeKVCache) -> None:
        self.kv_cache = kv_cache
        self.events: list[TransferEvent] = []
        self.sends: dict[int, FakeSend] = {}
        self.receives: dict[int, FakeReceive] = {}
        #: Receives that have ended and whose event the engine has not seen.
        self._ending: dict[int, FakeReceive] = {}
        self._next_chunk = 0
        self._send_of_chunk: dict[int, FakeSend] = {}
        #: Peers for which there is no staging slot.
        self.without_slots: set[str] = set()

    def can_receive_from(self, peer: str) -> bool:
        return peer not in self.without_slots

    def take_event(self, index: int = 0) -> TransferEvent:
        event = self.events.pop(index)
        if isinstance(event, ReceiveFinished):
            self.kv_cache.receiving -= set(self._ending.pop(event.transfer_id).slots)
        return event

    # --- sending: the engine's side --------------------------------------------------------------------

    def open_send(self, transfer_id: int, peer: str, num_prompt_tokens: int, first_token: int) -> None:
        assert transfer_id not in self.sends, f"send {transfer_id} opened twice"
        assert 0 <= first_token < num_prompt_tokens, (first_token, num_prompt_tokens)
        self.sends[transfer_id] = FakeSend(transfer_id, peer, num_prompt_tokens, first_token)

    def begin_chunk(self, transfer_id: int, first_token: int, slots: Sequence[int]) -> int:
        self._next_chunk += 1
        send = self.sends.get(transfer_id)
        if send is None or send.aborted:
            return self._next_chunk
        assert not send.closed and slots, f"chunk of {len(slots)} tokens, closed: {send.closed}"
        assert first_token == send.begun, f"chunk at {first_token}, expected at {send.begun}"
        send.slots += slots
        assert send.begun <= send.num_prompt_tokens, f"{send.begun} of {send.num_prompt_tokens} tokens announced"
        send.ready[self._next_chunk] = 0
        send.ends[self._next_chunk] = send.begun
        self._send_of_chunk[self._next_chunk] = send
        return self._next_chunk

    def layers_ready(
        self, chunk_ids: Sequence[int], num_layers_done: int, event: torch.cuda.Event | None = None
    ) -> None:
        for chunk_id in chunk_ids:
            if (send := self._send_of_chunk.get(chunk_id)) is None:
                continue
            assert send.ready[chunk_id] < num_layers_done <= self.kv_cache.spec.num_layers, (chunk_id, num_layers_done)
            send.ready[chunk_id] = num_layers_done

    def close_send(self, transfer_id: int) -> None:
        if (send := self.sends.get(transfer_id)) is not None and not send.aborted:
            assert not send.closed, f"send {transfer_id} closed twice"
            assert send.begun == send.num_prompt_tokens, f"closed at {send.begun} of {send.num_prompt_tokens}"
            assert all(n == self.kv_cache.spec.num_layers for n in send.ready.values()), f"layers missing: {send.ready}"
            send.closed = True

    def abort_send(self, transfer_id: int) -> None:
        if (send := self.sends.get(transfer_id)) is not None:
            send.aborted = True

    # --- sending: the test's side ----------------------------------------------------------------------

    def tokens_ready(self, transfer_id: int) -> int:
        """End of the positions whose KV is final in all layers."""
        send = self.sends[transfer_id]
        done = [send.ends[c] for c, layers in send.ready.items() if layers == self.kv_cache.spec.num_layers]
        return max(done, default=send.first_token)

    def read(self, transfer_id: int, position: int) -> int:
        """The token whose KV lies at `position` of the prompt being sent."""
        send = self.sends[transfer_id]
        entry = self.kv_cache.slots[send.slots[position - send.first_token]]
        assert entry is not None and entry[1] == position, f"position {position} of send {transfer_id} holds {entry}"
        return entry[0]

    def finish_send(self, transfer_id: int, outcome: Outcome, reason: str = "") -> None:
        send = self.sends.pop(transfer_id)
        for chunk_id in send.ready:
            del self._send_of_chunk[chunk_id]
        count = len(send.slots)
        self.events.append(SendFinished(transfer_id, send.peer, outcome, count, count * 64, 0.0, 0.01, reason))

    # --- receiving: the engine's side ------------------------------------------------------------------

    def open_receive(self, transfer_id: int, peer: str, first_token: int, slots: Sequence[int]) -> None:
        assert transfer_id not in self.receives and slots, f"receive {transfer_id} of {len(slots)} tokens"
        assert not self.kv_cache.receiving & set(slots), "two transfers into one block"
        self.receives[transfer_id] = FakeReceive(transfer_id, peer, first_token, list(slots))
        self.kv_cache.receiving |= set(slots)

    def abort_receive(self, transfer_id: int) -> None:
        if transfer_id in self.receives:
            self.finish_receive(transfer_id, "aborted")

    def seal(self, transfer_id: int, messages: int, num_bytes: int) -> None:
        if (receive := self.receives.get(transfer_id)) is not None:
            receive.sealed = True
            self._settle(receive)

    # --- receiving: the test's side --------------------------------------------------------------------

    def land(self, transfer_id: int, position: int, token: int) -> None:
        """The KV of one prompt token arrives; dropped if the receive is over."""
        if (receive := self.receives.get(transfer_id)) is None:
            return
        self.kv_cache.slots[receive.slots[position - receive.first_token]] = (token, position)
        receive.landed.add(position)
        self._settle(receive)

    def finish_receive(self, transfer_id: int, outcome: Outcome, reason: str = "") -> None:
        receive = self._ending[transfer_id] = self.receives.pop(transfer_id)
        count = len(receive.landed)
        self.events.append(
            ReceiveFinished(transfer_id, receive.peer, outcome, count, count * 64, reason, 0.0, landed_after_seal=0.0)
        )

    def _settle(self, receive: FakeReceive) -> None:
        if receive.sealed and receive.complete:
            self.finish_receive(receive.transfer_id, "ok")


class FakePairing:
    """The part of `KVTransfer` that servicers and pairs use; what they ask for is written down, in order."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.calls: list[tuple[object, ...]] = []
        #: What the next `connect` fails with.
        self.refuse: Exception | None = None

    def local_peer(self) -> TransportPeer:
        return TransportPeer(transport="fake", agent=self.agent, slot_bytes=64, num_slots=4)

    def connect(self, peer: str, info: TransportPeer, *, receive: bool) -> "Future[None]":
        self.calls.append(("connect", peer, info.agent, receive))
        paired: Future[None] = Future()
        if self.refuse is not None:
            paired.set_exception(self.refuse)
        else:
            paired.set_result(None)
        return paired

    def disconnect(self, peer: str) -> None:
        self.calls.append(("disconnect", peer))

    def prove_dead(self, peer: str) -> None:
        self.calls.append(("prove_dead", peer))

    def add_credits(self, peer: str, grants: Sequence[SlotGrant]) -> None:
        self.calls.append(("add_credits", peer, tuple(grants)))

    def seal(self, transfer_id: int, messages: int, num_bytes: int) -> None:
        self.calls.append(("seal", transfer_id, messages, num_bytes))

    def counters(self) -> TransferCounters:
        drops = {drop.value: 0 for drop in Drop}
        return TransferCounters(0, 0, 0, 0, drops, StagingCounts(4, 0, 0), 0, 0, 0, 0, 0)
