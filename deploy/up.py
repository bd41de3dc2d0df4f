"""`tandem up`: the whole system on this machine, from one command."""

import asyncio

import click

from common.config import BYTES, PORT, REDIS_URL, Address, option
from common.errors import ConfigError
from common.model_source import model_name
from deploy.demo_model import resolve_model
from deploy.launch import Launcher
from deploy.local import LocalPlan
from deploy.ports import require_free

LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"], case_sensitive=False)


@click.command(short_help="Run everything on this machine.")
@option("--model", default="demo", help="Model: a Hugging Face folder, a hub id, or `demo` (SmolLM2-135M-Instruct).")
@option("--served-model-name", help="Name that clients use; default: the folder's name or the hub id.")
@option("--prefill", "num_prefill", type=click.IntRange(0), default=1, help="Number of prefill workers.")
@option("--decode", "num_decode", type=click.IntRange(1), default=1, help="Number of decode workers.")
@option("--host", default="127.0.0.1", help="Address on which the gateway listens, for HTTP and gRPC.")
@option("--http-port", type=PORT, default=8000, help="Port of the OpenAI API.")
@option("--grpc-port", type=PORT, default=8001, help="Port of the gRPC API.")
@option(
    "--redis", "redis_url", type=REDIS_URL, default="", help="Redis URL; default: an embedded Valkey for this run only."
)
@option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where workers compute.")
@option("--dtype", type=click.Choice(["auto", "float32", "float16", "bfloat16"]), help="Type of weights and KV.")
@option("--threads", type=click.IntRange(1), help="CPU threads of each worker; default: all cores, shared.")
@option("--kv-memory", type=BYTES, help="KV cache of each worker.")
@option("--max-model-len", type=click.IntRange(1), help="Longest prompt plus output, in tokens.")
@option("--max-batch-tokens", type=click.IntRange(1), help="Token budget of an engine step.")
@option("--max-batch-size", type=click.IntRange(1), help="Sequences in a batch.")
@option("--block-size", type=click.IntRange(1), help="Tokens in a KV block.")
@option("--transport", type=click.Choice(["auto", "ucx", "grpc"]), help="How KV travels between workers.")
@option("--local-prefill-tokens", type=click.IntRange(0), help="Prompts up to this many uncached tokens: on decode.")
@option("--drain-seconds", type=click.FloatRange(0), default=30.0, help="How long running requests may finish.")
@option("--log-level", type=LOG_LEVELS, default="warning", help="Log level of all processes.")
def command(
    model: str,
    served_model_name: str | None,
    num_prefill: int,
    num_decode: int,
    host: str,
    http_port: int,
    grpc_port: int,
    redis_url: str,
    drain_seconds: float,
    log_level: str,
    local_prefill_tokens: int | None,
    **worker_options: object | None,
) -> int:
    """Run the whole system on this machine: gateway, prefill and decode workers, and a Valkey if no --redis is given.

    A process that dies is started again. Ctrl-C drains and stops everything; pressed twice, it stops at once. Further
    options of the services are taken from their TANDEM_ variables (see `tandem prefill --help` and the others).
    """
    http, grpc = Address(host, http_port), Address(host, grpc_port)
    if http_port == grpc_port:
        raise ConfigError(f"{http_port} is --http-port already", field="--grpc-port")
    require_free(http, "--http-port")
    require_free(grpc, "--grpc-port")
    folder = resolve_model(model, lambda line: click.echo(f"model: {line}"))
    plan = LocalPlan(
        model=folder,
        model_name=served_model_name or model_name(model),
        num_prefill=num_prefill,
        num_decode=num_decode,
        http=http,
        grpc=grpc,
        redis_url=redis_url,
        log_level=log_level,
        drain_seconds=drain_seconds,
        worker_options=_given(worker_options),
        routing_options=_given({"local_prefill_tokens": local_prefill_tokens}),
    )
    return asyncio.run(Launcher(plan, click.echo).run())


def _given(values: dict[str, object | None]) -> dict[str, str]:
    """Options as a command line has them, less those left to the service's own default."""
    return {f"--{name.replace('_', '-')}": str(value) for name, value in values.items() if value is not None}
