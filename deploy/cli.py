"""The `tandem` command: one subcommand per process or task, each imported only when it is chosen."""

import importlib
from copy import copy
from dataclasses import dataclass
from typing import Any

import click

from common.config import run_command


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a subcommand lives, and its line in `tandem --help` (which must not import it)."""

    module: str
    summary: str
    #: It takes --model; `demo` is prepared for it here, for services know nothing of deploy.
    serves_model: bool = False


COMMANDS = {
    "up": Entry("deploy.up", "Run everything on this machine: gateway, workers, Valkey."),
    "gateway": Entry("gateway.__main__", "Run one gateway.", serves_model=True),
    "prefill": Entry("prefill_svc.__main__", "Run one prefill worker.", serves_model=True),
    "decode": Entry("decode_svc.__main__", "Run one decode worker.", serves_model=True),
    "chat": Entry("deploy.chat", "Talk to a model in the terminal."),
    "status": Entry("deploy.status", "Show the workers, the queue and the P:D ratio of a gateway."),
    "bench": Entry("deploy.bench.command", "Measure a server that speaks OpenAI."),
}


class LazyGroup(click.Group):
    """A group that knows its subcommands' names, and imports one when it is invoked or asked for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        return load(entry) if entry else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


def load(entry: Entry) -> click.Command:
    """Import `command` from the entry's module."""
    command: click.Command = importlib.import_module(entry.module).command
    return _with_model_prepared(command) if entry.serves_model else command


def _with_model_prepared(command: click.Command) -> click.Command:
    """`command`, called with the folder of its model: a folder, a hub id or `demo`."""
    run = command.callback
    assert run is not None

    def prepared(**options: Any) -> Any:
        resolve_model = importlib.import_module("deploy.demo_model").resolve_model
        return run(**options | {"model": str(resolve_model(options["model"], _progress))})

    # A copy: whoever calls the service's own command gets that.
    wrapped = copy(command)
    wrapped.callback = prepared
    return wrapped


def _progress(line: str) -> None:
    click.echo(f"model: {line}", err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="tandem-serve", prog_name="tandem")
def tandem() -> None:
    """Serve large language models with prefill and decode apart."""


def main() -> None:
    """Entry point of the `tandem` script."""
    run_command(tandem, prog_name="tandem")


if __name__ == "__main__":
    main()
