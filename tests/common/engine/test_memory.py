"""How much memory the KV cache gets."""

from pathlib import Path

import pytest

from common.engine.memory import KVMemory, available_cpu_bytes, granted_bytes
from common.errors import ConfigError

MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n"


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    return path


def test_a_machine_without_limits(tmp_path: Path, meminfo: Path) -> None:
    assert available_cpu_bytes(meminfo, tmp_path) == 8_000_000 * 1024


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "cache_key"),
    [
        (".", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_with_a_limit(
    tmp_path: Path, meminfo: Path, folder: str, limit: str, usage: str, cache_key: str
) -> None:
    cgroup = tmp_path / "cgroup" / folder
    cgroup.mkdir(parents=True)
    (cgroup / limit).write_text("1000000\n")
    (cgroup / usage).write_text("700000\n")
    (cgroup / "memory.stat").write_text(f"anon 5\n{cache_key} 200000\n")
    assert available_cpu_bytes(meminfo, tmp_path / "cgroup") == 500_000


def test_a_container_without_a_limit(tmp_path: Path, meminfo: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert available_cpu_bytes(meminfo, tmp_path) == 8_000_000 * 1024


def test_this_machine_has_some() -> None:
    assert available_cpu_bytes() > 0


def test_wishes() -> None:
    assert granted_bytes(KVMemory(), free=1000, default=300) == 300
    assert granted_bytes(KVMemory(fraction=0.25), free=1000, default=300) == 250
    assert granted_bytes(KVMemory(num_bytes=900), free=1000, default=300) == 900
    with pytest.raises(ConfigError, match=r"1,001 bytes .* 1,000 are free"):
        granted_bytes(KVMemory(num_bytes=1001), free=1000, default=300)


@pytest.mark.parametrize(
    ("num_bytes", "fraction"), [(0, None), (-1, None), (None, 0.0), (None, 1.5), (None, float("nan")), (5, 0.5)]
)
def test_wishes_that_cannot_work(num_bytes: int | None, fraction: float | None) -> None:
    with pytest.raises(ConfigError) as caught:
        KVMemory(num_bytes=num_bytes, fraction=fraction)
    assert caught.value.field == "kv_memory"
