"""The fingerprint: what changes it and what does not."""

import json
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from common.engine.loader import fingerprint as module
from common.engine.loader import weights_fingerprint
from common.engine.loader.checkpoint import TensorEntry, list_tensors
from common.errors import ModelError
from common.file_memo import FileMemo
from tests.factories.models import write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model", "qwen2")
    return tmp_path / "model"


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_copy_has_the_same(folder: Path, tmp_path: Path) -> None:
    fingerprint = weights_fingerprint(folder)
    assert len(fingerprint) == 32
    shutil.copytree(folder, tmp_path / "copy")
    edit_config(tmp_path / "copy", transformers_version="4.0", torch_dtype="bfloat16")
    assert weights_fingerprint(tmp_path / "copy") == fingerprint


def test_sharding_does_not_change_it(folder: Path) -> None:
    fingerprint = weights_fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert weights_fingerprint(folder) == fingerprint


def test_config_and_weights_change_it(folder: Path, tmp_path: Path) -> None:
    fingerprints = {weights_fingerprint(folder)}
    edit_config(folder, rms_norm_eps=1e-5)
    fingerprints.add(weights_fingerprint(folder))
    write_tiny_model(tmp_path / "other", "qwen2", seed=1)
    fingerprints.add(weights_fingerprint(tmp_path / "other"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, folder / "model.safetensors")
    fingerprints.add(weights_fingerprint(folder))
    assert len(fingerprints) == 4


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, TensorEntry]]]:
    """A model and where its tensors lie; whoever changes it changes it back."""
    folder = tmp_path_factory.mktemp("weights")
    write_tiny_model(folder, "qwen2")
    return folder, sorted(list_tensors(folder).items())


@given(data=st.data(), piece_bytes=st.sampled_from([module.PIECE_BYTES, 1000, 4096]))
@settings(max_examples=60)
def test_any_bit_of_any_tensor_changes_it(
    weights: tuple[Path, list[tuple[str, TensorEntry]]], data: st.DataObject, piece_bytes: int
) -> None:
    folder, tensors = weights
    _, entry = data.draw(st.sampled_from(tensors), label="tensor")
    at = entry.offset + data.draw(st.integers(0, entry.num_bytes - 1), label="byte")
    bit = 1 << data.draw(st.integers(0, 7), label="bit")
    with pytest.MonkeyPatch.context() as patch, entry.path.open("r+b") as file:
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        before = weights_fingerprint(folder)
        flip(file, at, bit)
        changed = weights_fingerprint(folder)
        flip(file, at, bit)
        assert changed != before == weights_fingerprint(folder)


def flip(file: BinaryIO, at: int, bit: int) -> None:
    file.seek(at)
    old = file.read(1)[0]
    file.seek(at)
    file.write(bytes([old ^ bit]))
    file.flush()


def test_tensors_that_change_places_change_it(folder: Path) -> None:
    before = weights_fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, folder / "model.safetensors")
    assert weights_fingerprint(folder) != before


def test_a_memo_changes_nothing_but_the_time_it_takes(folder: Path, tmp_path: Path) -> None:
    memo = FileMemo(tmp_path / "memo", clock=lambda: float("inf"))
    expected = weights_fingerprint(folder)
    with pytest.MonkeyPatch.context() as patch:
        assert weights_fingerprint(folder, memo) == expected
        patch.setattr(module, "_hash_piece", None)  # the weights are not read again
        assert weights_fingerprint(folder, memo) == expected
        edit_config(folder, rms_norm_eps=1e-5)
        assert weights_fingerprint(folder, memo) != expected
    write_tiny_model(folder, "qwen2", seed=1)
    assert weights_fingerprint(folder, memo) == weights_fingerprint(folder)


def test_a_file_that_shrinks_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = list_tensors(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr(module, "list_tensors", lambda _: entries)
    with pytest.raises(ModelError, match="has become shorter"):
        weights_fingerprint(folder)
    path.unlink()
    for memo in (None, FileMemo(folder / "memo")):
        with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors: No such file"):
            weights_fingerprint(folder, memo)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        weights_fingerprint(tmp_path / "missing")
