"""`tandem status`: the workers, the queue and the wanted ratio, as a gateway sees them."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from common.config import option
from common.errors import NoWorker

TIMEOUT_SECONDS = 10.0
TABLE_WIDTH = 120


@click.command(short_help="Show the workers, the queue and the P:D ratio of a gateway.")
@option("--url", default="http://127.0.0.1:8000", help="A gateway.")
@option("--json", "as_json", is_flag=True, help="Print the gateway's answer as JSON.")
def command(url: str, as_json: bool) -> None:
    """Show the workers, the queue and the P:D ratio as a gateway sees them."""
    status = fetch_status(url)
    if as_json:
        click.echo(json.dumps(status, indent=2))
        return
    # A pipe has no width of its own; a table cut to 80 columns would be of no use there.
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, soft_wrap=True)
    console.print(workers_table(status["workers"]))
    for name in ("queue", "ratio"):
        console.print(figures_line(name, status[name]), highlight=False)


def fetch_status(url: str) -> Any:
    """What the gateway at `url` answers to GET /tandem/status.

    Raises:
        NoWorker: it cannot be reached, or does not answer with a status.
    """
    try:
        answer = httpx.get(f"{url.rstrip('/')}/tandem/status", timeout=TIMEOUT_SECONDS)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoWorker(f"{url} gives no status: {error}") from error


def workers_table(workers: list[Mapping[str, Any]]) -> Table:
    """One row per worker."""
    table = Table(title=None if workers else "no workers")
    for heading in ("worker", "role", "state", "pid", "address"):
        table.add_column(heading)
    for heading in ("blocks", "free", "cached", "owned", "running", "waiting"):
        table.add_column(heading, justify="right")
    for worker in workers:
        blocks = worker["blocks"]
        counts = (blocks["total"], blocks["free"], blocks["cached"], blocks["owned"])
        addresses = worker["addresses"]
        named = addresses.values() if isinstance(addresses, Mapping) else addresses
        cells = (worker["id"], worker["role"], worker["state"], worker["pid"], ", ".join(map(str, named)))
        table.add_row(*map(str, (*cells, *counts, worker["running"], worker["waiting"])))
    return table


def figures_line(name: str, figures: Mapping[str, Any]) -> str:
    """`queue: waiting 3, running 2`; nested figures keep their outer name."""
    return f"{name}: {', '.join(_flat(figures))}"


def _flat(figures: Mapping[str, Any], prefix: str = "") -> list[str]:
    parts = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            parts += _flat(value, f"{prefix}{name}.")
        else:
            shown = f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)
            parts.append(f"{prefix}{name} {shown}")
    return parts
