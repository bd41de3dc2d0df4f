"""Where the cache is."""

from pathlib import Path

import pytest

from common.cache_dir import cache_dir


def test_cache_dir_follows_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TANDEM_CACHE_DIR", raising=False)
    assert cache_dir() == Path("/home/me/.cache/tandem")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/tandem")
    monkeypatch.setenv("TANDEM_CACHE_DIR", "~/own")
    assert cache_dir() == Path("/home/me/own")
