"""The demo model, for real: logits and greedy tokens against transformers, in fp32."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.engine.loader import load_model
from common.engine.models.decoder import CausalLM
from deploy.demo_model import ensure_demo_model
from tests.factories.oracle import Oracle
from tests.factories.sequences import SequenceDriver

TEXT = (
    "The river rises in the hills above the town, and for most of the year it is no more than a stream. "
    "In spring, when the snow melts, it fills its bed and carries branches, and once a whole shed, to the mill. "
    "People here still measure the years by its floods: {} was the year when the bridge went. "
)


@pytest.fixture(scope="module")
def demo_model_path() -> Path:
    return ensure_demo_model()


@pytest.fixture(scope="module")
def demo_model(demo_model_path: Path) -> CausalLM:
    return load_model(demo_model_path, device=torch.device("cpu"), dtype=None)


@pytest.fixture(scope="module")
def demo_oracle(demo_model_path: Path) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(demo_model_path, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def text_ids(demo_model_path: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(demo_model_path / "tokenizer.json"))
    ids: list[int] = tokenizer.encode("".join(TEXT.format(1900 + i) for i in range(12))).ids
    return ids


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("length", [1, 16, 17, 300])
def test_logits_and_greedy_tokens(demo_model: CausalLM, demo_oracle: Oracle, text_ids: list[int], length: int) -> None:
    ids = text_ids[:length]
    assert len(ids) == length
    driver = SequenceDriver(demo_model)
    logits = driver.prefill(driver.sequence(ids), chunk_size=128)
    torch.testing.assert_close(logits, demo_oracle.logits(ids)[-1], rtol=0, atol=2e-3)
    assert driver.greedy(driver.sequence(ids), 16, chunk_size=128) == demo_oracle.greedy_cached(ids, 16)


@pytest.mark.slow
def test_the_demo_model_as_loaded(demo_model: CausalLM) -> None:
    assert demo_model.dtype == torch.float32
    assert demo_model.config.num_layers == 30
    assert demo_model.config.max_length == 8192
    assert demo_model.eos_token_ids == (2,)
