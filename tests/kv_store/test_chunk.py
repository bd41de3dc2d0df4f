import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_store.layout import KVShape, as_slots
from kv_store.transfer.chunk import TAIL_BYTES, OutgoingChunk

LAYER_TOKEN = KVShape(1, 1, 4, torch.float32).token_layer_bytes


def chunk(layers: int, tokens: int, slot_tokens: int, *, ends_prompt: bool = True, dim: int = 4) -> OutgoingChunk:
    shape = KVShape(layers, 1, dim, torch.float32)
    slot_bytes = slot_tokens * shape.token_layer_bytes
    return OutgoingChunk(shape, 0, as_slots(range(tokens)), slot_bytes=slot_bytes, ends_prompt=ends_prompt)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.integers(1, 12),
    tokens=st.integers(1, 40),
    slot_tokens=st.integers(1, 200),
    ends_prompt=st.booleans(),
    data=st.data(),
)
def test_every_layer_and_token_goes_once_and_only_when_ready(
    layers: int, tokens: int, slot_tokens: int, ends_prompt: bool, data: st.DataObject
) -> None:
    outgoing = chunk(layers, tokens, slot_tokens, ends_prompt=ends_prompt)
    sent = np.zeros((layers, tokens), dtype=np.int64)
    ready = 0
    while ready < layers:
        ready = data.draw(st.integers(ready + 1, layers))
        outgoing.set_ready(ready)
        for _ in range(data.draw(st.integers(0, 5)) if ready < layers else layers * tokens):
            if (part := outgoing.next_message()) is None:
                break
            assert part.first_layer + part.num_layers <= ready
            assert part.num_layers * part.num_tokens <= slot_tokens
            token_end = part.first_token + part.num_tokens
            sent[part.first_layer : part.first_layer + part.num_layers, part.first_token : token_end] += 1
    assert outgoing.next_message() is None
    assert outgoing.sent_whole
    assert (sent == 1).all()


def messages_when_ready_one_by_one(outgoing: OutgoingChunk, layers: int) -> list[list[tuple[int, int]]]:
    """(first layer, layers) of the messages that go after each layer."""
    rounds = []
    for ready in range(1, layers + 1):
        outgoing.set_ready(ready)
        parts = []
        while (part := outgoing.next_message()) is not None:
            parts.append((part.first_layer, part.num_layers))
        rounds.append(parts)
    return rounds


def test_a_long_chunk_goes_layer_by_layer() -> None:
    assert messages_when_ready_one_by_one(chunk(4, 100, 120), 4) == [[(0, 1)], [(1, 1)], [(2, 1)], [(3, 1)]]


def test_a_tiny_prompt_goes_in_one_message() -> None:
    assert messages_when_ready_one_by_one(chunk(4, 3, 1000), 4) == [[], [], [], [(0, 4)]]


def test_after_the_last_layer_of_a_prompt_only_that_layer_is_left() -> None:
    tokens = TAIL_BYTES // LAYER_TOKEN
    assert messages_when_ready_one_by_one(chunk(6, tokens, tokens * 4), 6) == [[], [], [], [(0, 4)], [(4, 1)], [(5, 1)]]


def test_a_chunk_in_the_middle_of_a_prompt_makes_no_small_message() -> None:
    tokens = TAIL_BYTES // LAYER_TOKEN
    outgoing = chunk(6, tokens, tokens * 4, ends_prompt=False)
    assert messages_when_ready_one_by_one(outgoing, 6) == [[], [], [], [(0, 4)], [], [(4, 2)]]


def test_layers_that_wait_for_credit_travel_together() -> None:
    outgoing = chunk(6, 10, 30)
    outgoing.set_ready(1)
    outgoing.set_ready(5)
    part = outgoing.next_message()
    assert part is not None
    assert (part.first_layer, part.num_layers) == (0, 3)
