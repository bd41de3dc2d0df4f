import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_store.layout import KVShape, MessageRange, PageCopier, as_slots, plan_messages

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_pages(layers: int, blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(layers, 2, blocks, block_size, heads, dim).to(dtype)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 4),
    block_sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    heads=st.integers(1, 3),
    dim=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(1, 20),
    data=st.data(),
)
def test_gather_then_scatter_is_identity_for_any_block_sizes(
    seed: int,
    layers: int,
    block_sizes: tuple[int, int],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    num_tokens: int,
    data: st.DataObject,
) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    source, target = (random_pages(layers, 20 // b + 1, b, heads, dim, dtype) for b in block_sizes)
    before = target.clone()
    sender, receiver = PageCopier(source), PageCopier(target)
    first = data.draw(st.integers(0, layers - 1))
    count = data.draw(st.integers(1, layers - first))
    source_slots = as_slots(rng.permutation(sender.num_slots)[:num_tokens])
    target_slots = as_slots(rng.permutation(receiver.num_slots)[:num_tokens])

    wire = torch.empty(sender.shape.message_bytes(count, num_tokens), dtype=torch.uint8)
    sender.gather(first, count, source_slots, wire)
    receiver.scatter(first, count, target_slots, wire)

    flat_source = source.view(layers, 2, -1, heads, dim)
    before.view(layers, 2, -1, heads, dim)[first : first + count, :, target_slots] = flat_source[
        first : first + count, :, source_slots
    ]
    assert torch.equal(target, before)


def test_the_wire_form_is_layer_then_kv_then_token() -> None:
    pages = random_pages(3, 4, 4, 2, 5, torch.float32)
    copier = PageCopier(pages)
    wire = torch.empty(copier.shape.message_bytes(2, 3), dtype=torch.uint8)
    copier.gather(1, 2, as_slots([9, 0, 5]), wire)
    seen = wire.view(torch.float32).view(2, 2, 3, 2, 5)
    for token, (block, offset) in enumerate([(2, 1), (0, 0), (1, 1)]):
        assert torch.equal(seen[:, :, token], pages[1:3, :, block, offset])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    num_layers=st.integers(1, 40),
    first_layer=st.integers(0, 5),
    num_tokens=st.integers(1, 300),
    slot_tokens=st.integers(1, 500),
)
def test_planned_messages_cover_everything_once_and_fit_their_slots(
    num_layers: int, first_layer: int, num_tokens: int, slot_tokens: int
) -> None:
    shape = KVShape(num_layers + first_layer, 3, 8, torch.float16)
    slot_bytes = slot_tokens * shape.token_layer_bytes
    covered = np.zeros((num_layers + first_layer, num_tokens), dtype=np.int64)
    for part in plan_messages(shape, first_layer, num_layers, num_tokens, slot_bytes):
        assert 0 < shape.message_bytes(part.num_layers, part.num_tokens) <= slot_bytes
        covered[
            part.first_layer : part.first_layer + part.num_layers, part.first_token : part.first_token + part.num_tokens
        ] += 1
    assert (covered[first_layer:] == 1).all()
    assert (covered[:first_layer] == 0).all()


def test_short_ranges_share_a_message_and_long_layers_are_split_evenly() -> None:
    shape = KVShape(4, 1, 4, torch.float32)  # 32 bytes a token and layer
    short = list(plan_messages(shape, 0, 4, 10, slot_bytes=1024))
    assert short == [MessageRange(0, 3, 0, 10), MessageRange(3, 1, 0, 10)]
    long = list(plan_messages(shape, 2, 1, 50, slot_bytes=1024))
    assert long == [MessageRange(2, 1, 0, 25), MessageRange(2, 1, 25, 25)]


def test_slots_outside_of_the_pages_are_refused() -> None:
    copier = PageCopier(random_pages(1, 2, 4, 1, 2, torch.float32))
    with pytest.raises(AssertionError, match=r"slots 0\.\.8"):
        copier.check_slots([0, 8])
    with pytest.raises(AssertionError, match="slots -1"):
        copier.check_slots([-1])


def test_pages_must_be_contiguous() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        PageCopier(torch.zeros(2, 2, 4, 4, 2, 3).transpose(0, 1))
