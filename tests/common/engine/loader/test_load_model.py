"""Loading checkpoints: what is accepted in which form, and every way in which one can be wrong."""

import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.kernels.cpu.kernels import CpuKernels, CpuLinear
from common.engine.kernels.reference import ReferenceKernels
from common.engine.loader import load_model
from common.engine.models.decoder import CausalLM
from common.errors import ModelError
from tests.factories.models import write_tiny_model
from tests.factories.sequences import SequenceDriver, prompt

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path, "llama2")
    return tmp_path


def load(folder: Path, dtype: torch.dtype | None = None) -> CausalLM:
    return load_model(folder, device=CPU, dtype=dtype, kernels=ReferenceKernels())


def logits(model: CausalLM) -> Tensor:
    driver = SequenceDriver(model)
    return driver.prefill(driver.sequence(prompt(20, 300)))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_json(path: Path, **fields: Any) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | fields))


def shard(folder: Path) -> None:
    """Two files and an index in place of the single file."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, folder / file)
    weight_map = {n: file for file, members in parts.items() for n in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_a_sharded_checkpoint_is_the_same_model(folder: Path) -> None:
    expected = logits(load(folder))
    shard(folder)
    assert logits(load(folder)).equal(expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_stored_dtypes_widen_exactly(folder: Path, stored: torch.dtype) -> None:
    edit_weights(folder, lambda t: t.update({n: v.to(stored) for n, v in t.items()}))
    narrow = load(folder)
    edit_weights(folder, lambda t: t.update({n: v.float() for n, v in t.items()}))
    assert narrow.dtype == torch.float32
    assert logits(narrow).equal(logits(load(folder)))


def test_useless_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama3")  # tied
    expected = logits(load(tmp_path))

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(300, 96)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit_weights(tmp_path, change)
    assert logits(load(tmp_path)).equal(expected)


class WatchingKernels(CpuKernels):
    """Remembers the weights that it packs, as long as anybody else keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[weakref.ref[Tensor]] = []

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        self.given.append(weakref.ref(weight))
        return super().pack_linear(weight, bias)


def test_no_weight_is_held_beside_its_packed_form(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama3")  # tied: the embedding, too
    kernels = WatchingKernels()
    model = load_model(tmp_path, device=CPU, dtype=None, kernels=kernels)
    assert len(kernels.given) == 1 + 4 * model.config.num_layers
    assert [ref() for ref in kernels.given if ref() is not None] == []
    torch.testing.assert_close(logits(model), logits(load(tmp_path)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(Q_PROJ), f"lacks {Q_PROJ}"),
        (lambda t: [t.pop(n) for n in list(t) if "layers.2" in n], "lacks model.layers.2.* and 6 more"),
        (lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda t: t.update({"model.layers.9.x": torch.zeros(1)}), "no use for: model.layers.9.x"),
        (lambda t: t.update({Q_PROJ: torch.zeros(64, 32)}), re.escape(f"{Q_PROJ} has shape [64, 32]; ") + ".*64, 64"),
        (lambda t: t.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}), f"{Q_PROJ} has dtype I8; .*F32"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Callable[[dict[str, Tensor]], object], words: str) -> None:
    edit_weights(folder, change)
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_a_bias_that_the_config_does_not_know_is_not_ignored(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama-linear-biased")
    edit_json(tmp_path / "config.json", attention_bias=False)
    with pytest.raises(ModelError, match=r"no use for.*_proj\.bias"):
        load(tmp_path)


def test_missing_files(folder: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load(folder / "nowhere")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only safetensors"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json is not"):
        load(folder)


@pytest.mark.parametrize("size", [0, 4, 8, 100, 100_000])
def test_a_truncated_file(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder)


@pytest.mark.parametrize("header", [b"[]", b'{"x": {"dtype": "F32"}}', b'{"x": 3}', b"\xff"])
def test_a_malformed_header(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        load(folder)


def test_a_missing_shard_and_a_bad_index(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*b\.safetensors"):
        load(folder)
    index = folder / "model.safetensors.index.json"
    edit_json(index, weight_map={"x": "../elsewhere.safetensors"})
    with pytest.raises(ModelError, match=r"elsewhere.*not a file of the folder"):
        load(folder)
    edit_json(index, weight_map=None)
    with pytest.raises(ModelError, match="weight_map is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 2}, (7,)),
        ({}, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_tokens(
    folder: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").unlink()
    if generation is not None:
        edit_json(folder / "generation_config.json", **generation)
    edit_json(folder / "config.json", **config)
    assert load(folder).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", [1, None], -1, True])
def test_end_tokens_that_are_none(folder: Path, value: Any) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        load(folder)
