"""How much memory there is for the KV cache, on CPU and GPU; `kv_cache.num_blocks_for` turns it into blocks."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine.batch import SequenceChunk
from common.engine.kv_cache import KVCache, KVSpec
from common.engine.models.decoder import CausalLM
from common.engine.runner import ModelRunner
from common.errors import ConfigError

#: What a CPU worker takes unless told otherwise, and never more than this share of what is available.
CPU_DEFAULT_BYTES = 1 << 30
CPU_DEFAULT_FRACTION = 0.5
#: What a GPU worker takes of the free memory unless told otherwise.
GPU_DEFAULT_FRACTION = 0.9

_UNLIMITED = 1 << 62
#: Where version 2 and version 1 of cgroups keep limit, usage and the size of the cache that can be dropped.
_CGROUPS = (
    (".", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The operator's wish; at most one of the two is set."""

    #: Exactly so much.
    num_bytes: int | None = None
    #: A share in (0, 1] of the memory that is free once the model is loaded and has run its largest step.
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.num_bytes is not None and self.fraction is not None:
            raise ConfigError("give either bytes or a fraction for the KV cache, not both", field="kv_memory")
        if self.num_bytes is not None and self.num_bytes <= 0:
            raise ConfigError(f"{self.num_bytes} bytes of KV cache: must be positive", field="kv_memory")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"a fraction of {self.fraction} for the KV cache: must be in (0, 1]", field="kv_memory")


def kv_memory_bytes(wish: KVMemory, model: CausalLM, *, block_size: int, max_step_tokens: int) -> int:
    """Bytes for the KV cache of a loaded `model` whose steps compute at most `max_step_tokens` tokens.

    Raises:
        ConfigError: more was asked for than there is.
    """
    if model.device.type == "cuda":
        free = _free_cuda_bytes(model, block_size, max_step_tokens)
        default = int(free * GPU_DEFAULT_FRACTION)
    else:
        free = available_cpu_bytes()
        default = min(CPU_DEFAULT_BYTES, int(free * CPU_DEFAULT_FRACTION))
    return granted_bytes(wish, free, default)


def granted_bytes(wish: KVMemory, free: int, default: int) -> int:
    """What `wish` comes to with `free` bytes left; `default` if it says nothing."""
    if wish.num_bytes is None:
        return default if wish.fraction is None else int(free * wish.fraction)
    if wish.num_bytes > free:
        raise ConfigError(f"{wish.num_bytes:,} bytes of KV cache were asked for; {free:,} are free", field="kv_memory")
    return wish.num_bytes


def available_cpu_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process can still take: what the machine has, within the container's limit."""
    return min(_machine_bytes(meminfo), *(_cgroup_bytes(cgroup / folder, *files) for folder, *files in _CGROUPS))


def _machine_bytes(meminfo: Path) -> int:
    if not meminfo.exists():  # not Linux: total memory is the best there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_bytes(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> int:
    """What the limit leaves; page cache that can be dropped counts as free. No limit: a huge number."""
    limit = (folder / limit_file).read_text().strip() if (folder / limit_file).exists() else "max"
    if limit == "max":
        return _UNLIMITED
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / usage_file).read_text()) - int(stat.get(cache_key, 0))
    return max(int(limit) - used, 0)


def _free_cuda_bytes(model: CausalLM, block_size: int, max_step_tokens: int) -> int:
    """Free device memory, less what the largest step needs beside weights and KV (measured by running one)."""
    tokens = min(max_step_tokens, model.config.max_length)
    num_blocks = -(-tokens // block_size)
    spec = KVSpec.for_model(model.config, dtype=model.dtype, block_size=block_size, num_blocks=num_blocks)
    runner = ModelRunner(model, KVCache(spec, model.device))
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    chunk = SequenceChunk([0] * tokens, 0, range(num_blocks), wants_logits=True, targets=[0] * (tokens - 1), num_top=1)
    runner.run_scored([chunk])
    torch.cuda.synchronize(model.device)
    step_bytes = torch.cuda.max_memory_allocated(model.device) - before
    del runner
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    return int(free) - step_bytes
