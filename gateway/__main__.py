"""`python -m gateway` and `tandem gateway`."""

import asyncio
import gc
from pathlib import Path

import click

from common.config import BYTES, HOST_PORT, PORT_OR_ZERO, REDIS_URL, Address, option, run_command
from common.model_source import model_name, resolve_model
from common.telemetry.logs import LogFormat, configure_logging
from gateway.chat.reasoning import REASONING_PARSERS
from gateway.chat.tools.choose import TOOL_PARSERS
from gateway.router import PrefillPolicy
from gateway.service import Gateway, GatewayConfig
from gateway.tenants import ApiKeys


@click.command("gateway", help="Run one gateway: OpenAI over HTTP, tandem.v1.Inference over gRPC.")
@option("--model", default="demo", help="Hugging Face folder or hub id, or `demo`: tokenizer and template are read.")
@option("--served-model-name", default="", help="Name that clients use; default: the folder's or hub id.")
@option(
    "--redis",
    type=REDIS_URL,
    default="",
    help="URL of Redis or Valkey; empty: workers by address, a queue of this gateway alone.",
)
@option("--http-host", default="127.0.0.1", help="Address of the HTTP API.")
@option("--http-port", type=PORT_OR_ZERO, default=8000, help="Port of the HTTP API; 0 takes any free one.")
@option("--host", default="127.0.0.1", help="Address of the gRPC API.")
@option("--grpc-port", type=PORT_OR_ZERO, default=8001, help="Port of the gRPC API; 0 takes any free one.")
@option("--prefill", type=HOST_PORT, multiple=True, help="HOST:PORT of a prefill worker; repeatable.")
@option("--decode", type=HOST_PORT, multiple=True, help="HOST:PORT of a decode worker; repeatable.")
@option("--max-queue", type=click.IntRange(0), default=1024, help="Most waiting requests; beyond it 503.")
@option(
    "--api-key",
    multiple=True,
    show_default=False,
    help="Key that clients must send, repeatable; none: everybody may call. Better by variable or file: `ps` shows it.",
)
@option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of further keys, one a line: KEY or TENANT:KEY[:WEIGHT].",
)
@option("--cors-origin", multiple=True, help="Web origin that browsers may call from, or *; repeatable.")
@option("--max-body", type=BYTES, default="8MiB", help="Largest request body; beyond it 413.")
@option(
    "--response-ttl",
    type=click.IntRange(0, 31_536_000),
    default=3600,
    help="Seconds for which answers of /v1/responses are stored unless a request says no; 0: none is.",
)
@option(
    "--local-prefill-tokens",
    type=click.IntRange(0),
    default=32,
    help="Prompts with up to so many uncached tokens are prefilled on the decode worker.",
)
@option(
    "--prefill-policy",
    type=click.Choice([policy.value for policy in PrefillPolicy]),
    default=PrefillPolicy.COST.value,
    help="Longer prompts: where it is estimated to be faster, always on prefill workers, or always on decode workers.",
)
@option(
    "--tool-parser",
    type=click.Choice(TOOL_PARSERS),
    default="auto",
    help="How the model writes tool calls; auto: by its chat template, none: tools are refused.",
)
@option(
    "--reasoning-parser",
    type=click.Choice(REASONING_PARSERS),
    default="auto",
    help="Whether `<think>...</think>` is told from answers; auto: if the model's template or vocabulary has it.",
)
@option(
    "--worker-wait",
    type=click.FloatRange(0),
    default=15.0,
    help="Seconds that running requests wait for a decode worker when the last one was lost: time for a restart.",
)
@option("--max-attempts", type=click.IntRange(1), default=3, help="Decode workers on which one request may fail.")
@option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@option("--log-format", type=click.Choice(["text", "json"]), default="text")
@option("--drain-seconds", type=click.FloatRange(0), default=30.0, help="Longest wait for running work on SIGTERM.")
def command(
    model: str,
    served_model_name: str,
    redis: str,
    http_host: str,
    http_port: int,
    host: str,
    grpc_port: int,
    prefill: tuple[Address, ...],
    decode: tuple[Address, ...],
    max_queue: int,
    api_key: tuple[str, ...],
    api_key_file: Path | None,
    cors_origin: tuple[str, ...],
    max_body: int,
    response_ttl: int,
    local_prefill_tokens: int,
    prefill_policy: str,
    tool_parser: str,
    reasoning_parser: str,
    worker_wait: float,
    max_attempts: int,
    log_level: str,
    log_format: LogFormat,
    drain_seconds: float,
) -> None:
    keys = ApiKeys.load(api_key, api_key_file)
    configure_logging(log_level, log_format)
    config = GatewayConfig(
        model_folder=resolve_model(model),
        model_name=served_model_name or model_name(model),
        redis=redis,
        http=Address(http_host, http_port),
        grpc=Address(host, grpc_port),
        peers=(
            *(("prefill", str(address)) for address in prefill),
            *(("decode", str(address)) for address in decode),
        ),
        max_queue=max_queue,
        keys=keys,
        cors_origins=cors_origin,
        max_body_bytes=max_body,
        response_ttl=response_ttl,
        local_prefill_tokens=local_prefill_tokens,
        prefill_policy=PrefillPolicy(prefill_policy),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        worker_wait=worker_wait,
        max_attempts=max_attempts,
        drain_seconds=drain_seconds,
    )
    asyncio.run(_run(config))


async def _run(config: GatewayConfig) -> None:
    gateway = Gateway(config)
    # Modules, schemas and vocabulary stay: a garbage collection that looked through them would hold up every stream.
    gc.collect()
    gc.freeze()
    await gateway.run()


if __name__ == "__main__":
    run_command(command)
