"""The runner: what it returns, warm-up."""

from dataclasses import replace

import pytest
import torch

from common.engine.kv_cache import KVCache, KVSpec, num_blocks_for
from common.engine.loader import load_model
from common.engine.memory import CPU_DEFAULT_BYTES, KVMemory, kv_memory_bytes
from common.engine.models.decoder import CausalLM
from common.engine.runner import ModelRunner
from tests.factories.models import MAX_LENGTH, write_tiny_model
from tests.factories.sequences import SequenceDriver, prompt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama3")
    return load_model(folder, device=CPU, dtype=None)


def test_one_row_per_chunk_that_wants_logits_in_order(small_model: CausalLM) -> None:
    driver = SequenceDriver(small_model)
    prompts = [prompt(n, 300, seed=n) for n in (4, 1, 6, 1)]
    wanted = [True, False, True, True]
    chunks = [driver.chunk(driver.sequence(p), wants_logits=w) for p, w in zip(prompts, wanted, strict=True)]
    logits = driver.runner.run(chunks)
    assert logits.dtype == torch.float32
    alone = SequenceDriver(small_model)
    expected = [alone.prefill(alone.sequence(p)) for p, w in zip(prompts, wanted, strict=True) if w]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 64), (2, 2), (MAX_LENGTH * 2, 2)])
def test_warm_up_fits_any_cache(small_model: CausalLM, block_size: int, num_blocks: int) -> None:
    spec = KVSpec.for_model(small_model.config, dtype=torch.float32, block_size=block_size, num_blocks=num_blocks)
    ModelRunner(small_model, KVCache(spec, CPU)).warm_up()


def test_default_memory_is_modest(small_model: CausalLM) -> None:
    granted = kv_memory_bytes(KVMemory(), small_model, block_size=16, max_step_tokens=256)
    assert 0 < granted <= CPU_DEFAULT_BYTES
    assert kv_memory_bytes(KVMemory(num_bytes=4096), small_model, block_size=16, max_step_tokens=256) == 4096


def test_logits_may_be_changed_in_place(small_model: CausalLM) -> None:
    driver = SequenceDriver(small_model)
    logits = driver.runner.run([driver.chunk(driver.sequence([5, 6]))])
    logits.masked_fill_(logits < 0, 0.0)
    assert not logits.is_inference()


def test_a_sequence_beyond_the_models_length_is_a_broken_invariant(small_model: CausalLM) -> None:
    driver = SequenceDriver(small_model)
    with pytest.raises(AssertionError, match=f"{MAX_LENGTH + 1} tokens; the model ends at {MAX_LENGTH}"):
        driver.prefill(driver.sequence(prompt(MAX_LENGTH + 1, 300)))


def test_real_memory_of_a_cache_follows_its_size(small_model: CausalLM) -> None:
    granted = 1 << 20
    spec = KVSpec.for_model(small_model.config, dtype=small_model.dtype, block_size=16, num_blocks=0)
    blocks = num_blocks_for(granted, spec)
    cache = KVCache(replace(spec, num_blocks=blocks), CPU)
    assert granted - spec.bytes_per_block < cache.data.nbytes <= granted
