"""Options that both workers take, and the frozen values that they become."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import click

from common.config import BYTES, HOST_PORT, PORT_OR_ZERO, REDIS_URL, Address, option
from common.telemetry.logs import LogFormat

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How the process is reached and what it says of itself."""

    worker_id: str
    host: str
    port: int
    advertise: Address | None
    redis: str
    log_level: str
    log_format: LogFormat
    metrics_port: int
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine runs and how much memory it takes."""

    model: str
    served_model_name: str
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "float16", "bfloat16"]
    block_size: int
    kv_memory: int | None
    num_blocks: int | None
    max_model_len: int | None
    max_batch_tokens: int
    max_batch_size: int
    max_waiting: int
    step_seconds: float
    threads: int | None
    transport: Literal["auto", "ucx", "grpc"]
    staging_memory: int
    slot_bytes: int
    checksum: bool


_PROCESS_OPTIONS = (
    option("--worker-id", default="", help="Stable name of this worker, e.g. its pod's; drawn if empty."),
    option("--host", default="127.0.0.1", help="Address to listen on."),
    option("--port", type=PORT_OR_ZERO, default=0, help="gRPC port; 0 takes any free one."),
    option("--advertise", type=HOST_PORT, help="HOST:PORT under which peers reach this worker, if not host and port."),
    option(
        "--redis",
        type=REDIS_URL,
        default="",
        help="URL of Redis or Valkey, to be found by gateways; empty: by address only.",
    ),
    option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info"),
    option("--log-format", type=click.Choice(["text", "json"]), default="text"),
    option("--metrics-port", type=PORT_OR_ZERO, default=0, help="Prometheus metrics over HTTP; 0: off."),
    option("--drain-seconds", type=click.FloatRange(0), default=30.0, help="Longest wait for running work on SIGTERM."),
)

_ENGINE_OPTIONS = (
    option("--model", default="demo", help="Hugging Face folder or hub id, or `demo`."),
    option("--served-model-name", default="", help="Name that clients use; default: the folder's or hub id."),
    option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto"),
    option(
        "--dtype",
        type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
        default="auto",
        help="Of weights and KV; auto: float32 on a CPU, the model's own on a GPU.",
    ),
    option("--block-size", type=click.IntRange(1, 1024), default=16, help="Tokens in a KV block."),
    option("--kv-memory", type=BYTES, help="Memory for KV; default: 1GiB on a CPU, most of what is free on a GPU."),
    option("--num-blocks", type=click.IntRange(2), help="KV blocks; overrides --kv-memory."),
    option("--max-model-len", type=click.IntRange(2), help="Longest context in tokens; default: the model's own."),
    option("--max-batch-tokens", type=click.IntRange(16), default=2048, help="Most tokens computed in one step."),
    option("--max-batch-size", type=click.IntRange(1), default=64, help="Most sequences in a batch."),
    option("--max-waiting", type=click.IntRange(0), default=512, help="Most requests waiting for blocks."),
    option(
        "--step-seconds",
        type=click.FloatRange(0.001),
        default=0.25,
        help="Chunks of prompts are sized so that an engine step takes about so long.",
    ),
    option("--threads", type=click.IntRange(1), help="CPU threads for compute; default: all cores."),
    option(
        "--transport",
        type=click.Choice(["auto", "ucx", "grpc"]),
        default="auto",
        help="How KV travels; auto: UCX where nixl can be loaded, else gRPC.",
    ),
    option("--staging-memory", type=BYTES, default="64MiB", help="Registered memory that incoming KV lands in."),
    option("--slot-bytes", type=BYTES, default="1MiB", help="Largest KV message; equal on all workers."),
    option("--checksum/--no-checksum", default=False, help="Check every KV message by crc32."),
)


def worker_options(command: F) -> F:
    """Add the options of both groups to a click command."""
    for decorate in reversed((*_ENGINE_OPTIONS, *_PROCESS_OPTIONS)):
        command = decorate(command)
    return command


def split_options(values: dict[str, Any]) -> tuple[EngineOptions, ProcessOptions, dict[str, Any]]:
    """Parsed values as (engine options, process options, the rest)."""
    engine = {name: values.pop(name) for name in EngineOptions.__dataclass_fields__}
    process = {name: values.pop(name) for name in ProcessOptions.__dataclass_fields__}
    return EngineOptions(**engine), ProcessOptions(**process), values


def thread_count(options: EngineOptions) -> int:
    """Compute threads: as asked for, else the cores this process may use."""
    return options.threads or len(os.sched_getaffinity(0))
