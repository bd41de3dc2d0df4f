"""`python -m prefill_svc` and `tandem prefill`."""

import asyncio
from typing import Any

import click

from common.config import run_command
from common.service.options import split_options, worker_options
from common.telemetry.logs import configure_logging
from prefill_svc.process import PrefillProcess


@click.command("prefill", help="Run one prefill worker.")
@worker_options
def command(**values: Any) -> None:
    engine_options, options, _ = split_options(values)
    configure_logging(options.log_level, options.log_format)
    asyncio.run(PrefillProcess(engine_options, options).run())


if __name__ == "__main__":
    run_command(command)
