"""`python -m decode_svc` and `tandem decode`."""

from typing import Any

import click

from common.config import HOST_PORT, option, run_command
from common.engine.grammar.start import fork_process
from common.service.options import split_options, worker_options
from common.service.worker_process import run_worker
from common.telemetry.logs import configure_logging
from decode_svc.assembly import DecodeOptions, DecodeWorker


@click.command("decode", help="Run one decode worker.")
@worker_options
@option(
    "--local-prefill-tokens",
    type=click.IntRange(0),
    default=32,
    help="Prompts with up to so many uncached tokens are prefilled here.",
)
@option(
    "--prefill-timeout",
    type=click.FloatRange(0.1),
    default=60.0,
    help="Seconds without a sign of life after which another prefill worker is tried.",
)
@option("--prefill", type=HOST_PORT, multiple=True, help="HOST:PORT of a prefill worker to pair with; repeatable.")
def command(**values: Any) -> None:
    engine_options, options, rest = split_options(values)
    configure_logging(options.log_level, options.log_format)
    own_options = DecodeOptions(**rest, redis=options.redis)
    # Before threads, and before the model: what is loaded later would be in its memory too.
    compile_process = fork_process()
    run_worker(
        "decode",
        engine_options,
        options,
        lambda parts, context: DecodeWorker(parts, context, engine_options, own_options, compile_process),
    )


if __name__ == "__main__":
    run_command(command)
