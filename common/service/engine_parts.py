"""Builds what a worker's engine runs on: model, KV cache, block pool, runner, sampler, and the manifest of it all."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.cache_dir import cache_dir
from common.engine.block_pool import BlockPool
from common.engine.grammar.vocabulary import Vocabulary, vocabulary_of_folder
from common.engine.kernels import create_kernels
from common.engine.kv_cache import KVCache, KVSpec, num_blocks_for
from common.engine.loader import load_model, weights_fingerprint
from common.engine.memory import KVMemory, kv_memory_bytes
from common.engine.models.decoder import CausalLM
from common.engine.runner import ModelRunner
from common.engine.sampler import Sampler
from common.engine.scheduling import StepPacer
from common.errors import ConfigError
from common.file_memo import FileMemo
from common.manifest import WIRE_VERSION_MAX, WIRE_VERSION_MIN
from common.model_source import model_name, resolve_model
from common.pb.tandem.v1.worker_pb2 import Manifest
from common.service.options import EngineOptions, thread_count
from common.text.tokenizer_files import tokenizer_fingerprint

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """One worker's engine, not yet driven by anything."""

    manifest: Manifest
    pool: BlockPool
    runner: ModelRunner
    sampler: Sampler
    pacer: StepPacer
    eos_token_ids: tuple[int, ...]
    #: What grammars are compiled against; None if there can be none.
    vocabulary: Vocabulary | None
    #: Longest prompt plus output in tokens that the model and the pool allow.
    max_request_tokens: int


def build_engine_parts(options: EngineOptions) -> EngineParts:
    """Load the model and size the KV cache. Raises ConfigError or ModelError; takes seconds to minutes."""
    folder = resolve_model(options.model)
    torch.set_num_threads(thread_count(options))
    device = _device(options.device)
    model = load_model(folder, device=device, dtype=_dtype(options.dtype), kernels=None)
    max_model_len = _max_model_len(options, model)
    spec = _kv_spec(options, model)
    runner = ModelRunner(model, KVCache(spec, device))
    runner.warm_up()
    pool = BlockPool(spec.num_blocks, spec.block_size)
    _log.info(
        "model loaded",
        extra={
            "folder": folder.name,
            "device": str(device),
            "dtype": str(spec.dtype),
            "kernels": create_kernels(device, spec.dtype).name,
            "blocks": spec.num_blocks,
            "block_size": spec.block_size,
        },
    )
    return EngineParts(
        manifest=_manifest(options, folder, model, spec, max_model_len),
        pool=pool,
        runner=runner,
        sampler=Sampler(model.config.vocab_size, model.eos_token_ids),
        pacer=StepPacer(options.max_batch_tokens, options.step_seconds, start_tokens=min(64, options.max_batch_tokens)),
        eos_token_ids=model.eos_token_ids,
        vocabulary=vocabulary_of_folder(folder, model.config.vocab_size, model.eos_token_ids),
        max_request_tokens=min(max_model_len, spec.num_blocks * spec.block_size),
    )


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device here", field="--device")
    return torch.device(wanted)


def _dtype(wanted: str) -> torch.dtype | None:
    return {
        "auto": None,
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
    }[wanted]


def _max_model_len(options: EngineOptions, model: CausalLM) -> int:
    own = model.config.max_length
    if options.max_model_len is None:
        return own
    if options.max_model_len > own:
        raise ConfigError(f"{options.max_model_len} exceeds the model's own limit of {own}", field="--max-model-len")
    return options.max_model_len


def _kv_spec(options: EngineOptions, model: CausalLM) -> KVSpec:
    spec = KVSpec.for_model(model.config, dtype=model.dtype, block_size=options.block_size, num_blocks=1)
    if options.num_blocks is not None:
        return replace(spec, num_blocks=options.num_blocks)
    num_bytes = kv_memory_bytes(
        KVMemory(num_bytes=options.kv_memory),
        model,
        block_size=options.block_size,
        max_step_tokens=options.max_batch_tokens,
    )
    return replace(spec, num_blocks=num_blocks_for(num_bytes, spec))


def _manifest(options: EngineOptions, folder: Path, model: CausalLM, spec: KVSpec, max_model_len: int) -> Manifest:
    return Manifest(
        wire_version_min=WIRE_VERSION_MIN,
        wire_version_max=WIRE_VERSION_MAX,
        model=options.served_model_name or model_name(options.model),
        weights_fingerprint=weights_fingerprint(folder, _memo()),
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=str(spec.dtype).removeprefix("torch."),
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
    )


def _memo() -> FileMemo | None:
    try:
        return FileMemo(cache_dir() / "fingerprints")
    except RuntimeError:  # there is no home
        return None
