"""The KV cache: layout, views, copies of blocks, and how many blocks fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.kv_cache import MIN_BLOCKS, KVCache, KVSpec, num_blocks_for
from common.errors import ConfigError

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32, block_size=4, num_blocks=5)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_contiguous_zeroed_tensor(dtype: torch.dtype) -> None:
    spec = KVSpec(3, 2, 8, dtype, 4, 5)
    data = KVCache(spec, CPU).data
    assert (data.shape, data.dtype) == ((3, 2, 5, 4, 2, 8), dtype)
    assert data.is_contiguous()
    assert data.count_nonzero() == 0
    assert data.nbytes == spec.num_blocks * spec.bytes_per_block


def test_layers_are_views() -> None:
    cache = KVCache(SPEC, CPU)
    k, v = cache.layer(1)
    k.fill_(1)
    v.fill_(2)
    assert k.shape == (5, 4, 2, 8)
    assert cache.data[1, 0].eq(1).all()
    assert cache.data[1, 1].eq(2).all()
    assert cache.data[[0, 2]].count_nonzero() == 0


def test_the_memory_outlives_the_cache_object() -> None:
    k, _ = KVCache(SPEC, CPU).layer(0)
    k.fill_(3)
    assert k.eq(3).all()


def test_copying_a_block_touches_all_layers_and_no_other_block() -> None:
    cache = KVCache(SPEC, CPU)
    cache.data.normal_(generator=torch.Generator().manual_seed(0))
    before = cache.data.clone()
    cache.copy_block(3, 1)
    assert cache.data[:, :, 1].equal(before[:, :, 3])
    others = [0, 2, 3, 4]
    assert cache.data[:, :, others].equal(before[:, :, others])


def test_copying_outside_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="5"):
        KVCache(SPEC, CPU).copy_block(0, 5)


@given(
    memory=st.integers(0, 1 << 40), block_size=st.integers(1, 256), heads=st.integers(1, 64), layers=st.integers(1, 99)
)
def test_blocks_fit_and_one_more_would_not(memory: int, block_size: int, heads: int, layers: int) -> None:
    spec = KVSpec(layers, heads, 64, torch.float16, block_size, num_blocks=0)
    if memory < MIN_BLOCKS * spec.bytes_per_block:
        with pytest.raises(ConfigError) as caught:
            num_blocks_for(memory, spec)
        assert caught.value.field == "kv_memory"
    else:
        fit = num_blocks_for(memory, spec)
        assert fit * spec.bytes_per_block <= memory < (fit + 1) * spec.bytes_per_block


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"3,000 bytes of KV cache hold 1 blocks of 4 tokens \(1,536 bytes each\)"):
        num_blocks_for(3000, SPEC)
    with pytest.raises(ConfigError, match="hold 0 blocks"):
        num_blocks_for(-5, SPEC)
