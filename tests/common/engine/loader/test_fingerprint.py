"""The fingerprint: what changes it and what does not."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from common.engine.loader import weights_fingerprint
from common.errors import ModelError
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


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        weights_fingerprint(tmp_path / "missing")
