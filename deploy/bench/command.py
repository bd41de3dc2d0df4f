"""`tandem bench`: options in, figures out (a table on stdout, JSON into a file)."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeVar

import click
import httpx

from common.config import ENV_PREFIX, option
from common.errors import ConfigError, NoWorker
from deploy.api_key import api_key_option, auth_headers
from deploy.bench.client import OpenAIClient
from deploy.bench.options import ServeOptions, levels
from deploy.bench.report import report_text
from deploy.bench.run import Benchmark, Level
from deploy.bench.workload import Shape
from deploy.urls import SERVER_URL

#: Between two pieces of an answer.
READ_SECONDS = 600.0

F = TypeVar("F", bound=Callable[..., Any])


class IntList(click.ParamType[tuple[int, ...]]):
    """Click type of `1,4,16`."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,4,16", param, ctx)
        if min(numbers) < 1:
            self.fail("each must be at least 1", param, ctx)
        return numbers


def bench_option(*names: str, **kwargs: Any) -> Callable[[F], F]:
    """An option of the benchmark alone, read from TANDEM_BENCH_<NAME>: its names mean other things elsewhere."""
    flag = names[0].split("/")[0].removeprefix("--")
    return option(*names, envvar=f"{ENV_PREFIX}BENCH_{flag.replace('-', '_').upper()}", **kwargs)


@click.group(short_help="Measure a server that speaks OpenAI.")
def command() -> None:
    """Measure a server that speaks OpenAI."""


@command.command()
@option("--url", type=SERVER_URL, default="http://127.0.0.1:8000", help="The server (Tandem, vLLM, llama.cpp, ...).")
@option("--model", envvar="TANDEM_SERVED_MODEL_NAME", help="Model's name there; default: the first listed.")
@api_key_option()
@bench_option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", help="API to call.")
@bench_option(
    "--prompt", type=click.Choice(["ids", "text"]), default="ids", help="Token ids (exact lengths), or words."
)
@bench_option(
    "--concurrency", type=IntList(), default="1,4,16", help="Requests at once; a level of load for each number."
)
@bench_option("--rate", type=click.FloatRange(0, min_open=True), help="Instead: Poisson arrivals, so many a second.")
@bench_option(
    "--trace", type=click.Path(path_type=Path), help="Instead: replay a trace (Azure CSV or Mooncake JSON lines)."
)
@bench_option("--speed-up", type=click.FloatRange(0, min_open=True), default=1.0, help="Replay so many times as fast.")
@bench_option("--prompt-tokens", type=click.IntRange(1), default=128, help="Length of each prompt.")
@bench_option("--output-tokens", type=click.IntRange(1), default=128, help="Length of each answer.")
@bench_option("--shared-prefix", type=click.IntRange(0), default=0, help="Leading tokens that all prompts share.")
@bench_option("--num-requests", type=click.IntRange(1), help="Requests of a level; default: 4 for each at once.")
@bench_option(
    "--duration", type=click.FloatRange(0, min_open=True), help="Seconds after which a level begins no request."
)
@bench_option("--warm-up", type=click.IntRange(0), default=2, help="Requests sent before, at once, and not counted.")
@bench_option("--ignore-eos/--respect-eos", default=True, help="Ask for answers of the full length.")
@bench_option("--temperature", type=click.FloatRange(0), default=0.0, help="Sampling temperature.")
@bench_option("--token-range", type=(int, int), default=(1000, 30000), help="Token ids to draw prompts from: LOW HIGH.")
@bench_option(
    "--seed", type=int, help="Of prompts and arrivals; default: drawn, so that no run finds its prompts cached."
)
@bench_option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write all figures to this file.",
)
def serve(json_path: Path | None, **values: Any) -> None:
    """Send load to a server and measure what a client sees: TTFT, ITL, TPOT, throughput, errors."""
    if json_path and not os.access(json_path.parent, os.W_OK):
        raise ConfigError(f"{json_path.parent} is not a folder in which one can write", field="--json")
    if values["seed"] is None:
        values["seed"] = SystemRandom().randrange(2**32)
    options = ServeOptions(**values)
    report = asyncio.run(run(options, levels(options)))
    click.echo(report_text(report["levels"]))
    if json_path:
        json_path.write_text(json.dumps(report, indent=2, default=str) + "\n")


async def run(options: ServeOptions, wanted: list[Level]) -> dict[str, Any]:
    """Warm up, measure each level, and return everything that was found.

    Raises:
        NoWorker: the server cannot be reached, or answers none of the warm-up requests.
    """
    headers = auth_headers(options.api_key)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(READ_SECONDS, connect=10.0)
    async with httpx.AsyncClient(base_url=options.url, headers=headers, limits=limits, timeout=timeout) as http:
        model = options.model or await first_model(http)
        benchmark = Benchmark(
            _client(options, http, model),
            prompts_as_ids=options.prompt == "ids",
            seed=options.seed,
            shared_prefix=options.shared_prefix,
            token_range=options.token_range,
        )
        await _warm_up(benchmark, options, wanted[0].shapes[0])
        found = []
        for number, level in enumerate(wanted):
            click.echo(f"measuring: {level}", err=True)
            found.append(await benchmark.measure(number, level))
    described = {name: getattr(options, name) for name in ServeOptions.__dataclass_fields__ if name != "api_key"}
    return {**described, "model": model, "ended_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "levels": found}


def _client(options: ServeOptions, http: httpx.AsyncClient, model: str) -> OpenAIClient:
    path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"
    body = {"model": model, "temperature": options.temperature}
    return OpenAIClient(http, path, {**body, "ignore_eos": True} if options.ignore_eos else body)


async def _warm_up(benchmark: Benchmark, options: ServeOptions, shape: Shape) -> None:
    outcomes = await benchmark.warm_up(shape, options.warm_up)
    if outcomes and all(outcome.error for outcome in outcomes):
        raise NoWorker(f"{options.url} answered none of the warm-up requests: {outcomes[0].error}")


async def first_model(http: httpx.AsyncClient) -> str:
    """Name of the first model that the server lists.

    Raises:
        NoWorker: it cannot be reached, or lists none.
    """
    try:
        answer = await http.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise NoWorker(f"{http.base_url} lists no model: {error}") from error
