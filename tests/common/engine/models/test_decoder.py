"""The forward pass itself: when layers are announced, which rows come back, other dtypes."""

from pathlib import Path

import pytest
import torch

from common.engine.batch import build_batch
from common.engine.kernels.reference import ReferenceKernels
from common.engine.loader import load_model
from common.engine.models.decoder import CausalLM
from tests.factories.models import write_tiny_model
from tests.factories.oracle import Oracle, TinyModel
from tests.factories.sequences import SequenceDriver, prompt

CPU = torch.device("cpu")


def test_a_layer_is_announced_once_its_kv_is_final(model: CausalLM) -> None:
    driver = SequenceDriver(model)
    sequences = [driver.sequence(prompt(n, 300, seed=n)) for n in (20, 33)]
    seen: list[tuple[int, torch.Tensor]] = []

    def on_layer(layer: int, ready: torch.cuda.Event | None) -> None:
        assert ready is None
        seen.append((layer, driver.kv_cache.data[layer].clone()))

    driver.runner.run([driver.chunk(s) for s in sequences], on_layer)

    assert [layer for layer, _ in seen] == list(range(model.config.num_layers))
    for layer, snapshot in seen:
        assert torch.equal(driver.kv_cache.data[layer].nan_to_num(1e9), snapshot.nan_to_num(1e9))
        written = driver.kv_cache.data[layer, :, sequences[1].block_table[0]]
        assert written.isfinite().all()


def test_an_error_in_the_callback_reaches_the_caller(model: CausalLM) -> None:
    driver = SequenceDriver(model)

    def on_layer(layer: int, ready: torch.cuda.Event | None) -> None:
        raise RuntimeError("sender is gone")

    with pytest.raises(RuntimeError, match="sender is gone"):
        driver.runner.run([driver.chunk(driver.sequence([5]))], on_layer)


def test_no_row_wanted_still_stores_all_layers(model: CausalLM, tiny: TinyModel) -> None:
    driver = SequenceDriver(model)
    ids = prompt(30, 300)
    sequence = driver.sequence(ids)
    assert driver.runner.run([driver.chunk(sequence, 29, wants_logits=False)]).shape == (0, model.config.vocab_size)
    torch.testing.assert_close(driver.prefill(sequence), tiny.oracle.logits(ids)[-1], rtol=1e-4, atol=2e-4)


def test_hidden_states_and_logits_have_one_row_per_wanted_token(model: CausalLM) -> None:
    driver = SequenceDriver(model)
    chunks = [driver.chunk(driver.sequence(prompt(n, 300)), wants_logits=n != 4) for n in (3, 4, 5)]
    batch = build_batch(chunks, driver.kv_cache.spec.block_size, CPU)
    hidden = model.forward(batch, driver.kv_cache)
    assert hidden.shape == (2, model.config.hidden_size)
    logits = model.logits(hidden)
    assert (logits.shape, logits.dtype) == ((2, model.config.vocab_size), torch.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.35), (torch.float16, 0.05)])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_half_precision_stays_near_full(tmp_path: Path, name: str, dtype: torch.dtype, tolerance: float) -> None:
    ids = prompt(40, 300)
    expected = Oracle(write_tiny_model(tmp_path, name)).logits(ids)[-1]
    model = load_model(tmp_path, device=CPU, dtype=dtype, kernels=ReferenceKernels())
    driver = SequenceDriver(model)
    logits = driver.prefill(driver.sequence(ids), chunk_size=16)
    assert (model.dtype, driver.kv_cache.data.dtype, logits.dtype) == (dtype, dtype, torch.float32)
    assert (logits - expected).abs().max() < tolerance * expected.std()
