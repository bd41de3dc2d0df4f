"""Where models come from: folders, the demo, hub ids; and what is said when they do not."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from common import model_source
from common.errors import ConfigError
from common.model_source import DEMO_NAME, demo_folder, model_name, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder."""
    model = tmp_path / "TinyModel"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def test_a_folder_is_itself(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder
    assert model_name(f"{folder}/") == "TinyModel"


def test_the_demo_is_taken_once_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    assert model_name("demo") == DEMO_NAME
    with pytest.raises(ConfigError, match="not prepared yet"):
        resolve_model("demo")
    demo_folder().mkdir(parents=True)
    (demo_folder() / "config.json").write_text("{}")
    assert resolve_model("demo") == demo_folder()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such", "no such model folder"),
        ("name", "not a hub id"),
        ("a/b/c", "not a hub id"),
        ("", "not a model folder"),
    ],
)
def test_what_is_no_model(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        resolve_model(model)
    assert error.value.field == "--model"


def test_a_file_is_no_model_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a file, not a model folder"):
        resolve_model(str(folder / "config.json"))


def test_a_hub_id_is_fetched_without_code_or_pickles(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr(model_source, "snapshot_download", snapshot)
    assert resolve_model("owner/name-1.5") == folder
    assert asked == [("owner/name-1.5", ["*.safetensors", "*.json", "*.jinja"])]
    assert model_name("owner/name-1.5") == "owner/name-1.5"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (LocalEntryNotFoundError("offline"), "owner/name cannot be fetched .* not in the hub's cache"),
        (HFValidationError("no such id"), "owner/name cannot be fetched from the hub: no such id"),
        (OSError("401 no\nlong advice"), "owner/name cannot be fetched from the hub: 401 no$"),
    ],
)
def test_a_hub_that_fails_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str
) -> None:
    def snapshot(*args: Any, **kwargs: Any) -> str:
        raise failure

    monkeypatch.setattr(model_source, "snapshot_download", snapshot)
    with pytest.raises(ConfigError, match=message):
        resolve_model("owner/name")
