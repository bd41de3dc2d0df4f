"""`python -m prefill_svc` and `tandem prefill`."""

from typing import Any

import click

from common.config import run_command
from common.service.options import split_options, worker_options
from common.service.worker_process import run_worker
from common.telemetry.logs import configure_logging
from prefill_svc.assembly import PrefillWorker


@click.command("prefill", help="Run one prefill worker.")
@worker_options
def command(**values: Any) -> None:
    engine_options, options, _ = split_options(values)
    configure_logging(options.log_level, options.log_format)
    run_worker("prefill", engine_options, options, lambda parts, context: PrefillWorker(parts, context, engine_options))


if __name__ == "__main__":
    run_command(command)
