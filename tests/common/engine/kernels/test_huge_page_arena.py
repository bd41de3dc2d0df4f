"""Memory for weights: whole, aligned, and gone with its last tensor."""

import gc
from pathlib import Path

import torch

from common.engine.kernels.cpu.memory import REGION_BYTES, HugePageArena, map_region


def test_tensors_are_disjoint_and_aligned() -> None:
    arena = HugePageArena()
    tensors = [arena.take(numel).fill_(i) for i, numel in enumerate((1, 15, 16, 17, 1_000_000, 3))]
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == i).all()


def test_more_than_a_region_gets_one_of_its_own() -> None:
    arena = HugePageArena()
    small, large, next_small = arena.take(10), arena.take(REGION_BYTES // 4 + 1), arena.take(10)
    assert large.numel() == REGION_BYTES // 4 + 1
    large[-1] = small[0] = next_small[0] = 1.0


def test_a_region_starts_at_a_huge_page_and_holds_what_was_asked() -> None:
    region = map_region(5_000_000)
    assert region.data_ptr() % (2 << 20) == 0
    assert region.nbytes >= 5_000_000


def test_memory_returns_when_the_last_tensor_dies() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    arena = HugePageArena()
    first, second = arena.take(4 << 20).fill_(1.0), arena.take(4 << 20).fill_(1.0)
    del arena, first
    full = resident()
    assert second.sum() == 4 << 20
    del second
    gc.collect()
    assert full - resident() >= 30_000_000


def test_taking_nothing_is_allowed() -> None:
    assert torch.equal(HugePageArena().take(0), torch.empty(0))
