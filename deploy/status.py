"""`tandem status`: the workers, the queue and the wanted ratio, as a gateway sees them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import httpx

from common.config import option
from common.errors import NoWorker
from deploy.api_key import api_key_option, auth_headers
from deploy.figures import short, table
from deploy.refusals import refusal
from deploy.urls import SERVER_URL

TIMEOUT_SECONDS = 10.0
_BLOCKS = ("total", "free", "cached", "owned")


@click.command(short_help="Show the workers, the queue and the P:D ratio of a gateway.")
@option("--url", type=SERVER_URL, default="http://127.0.0.1:8000", help="A gateway.")
@api_key_option()
@option("--json", "as_json", is_flag=True, help="Print the gateway's answer as JSON.")
def command(url: str, api_key: str, as_json: bool) -> None:
    """Show the workers, the queue and the P:D ratio as a gateway sees them."""
    status = fetch_status(url, auth_headers(api_key))
    click.echo(json.dumps(status, indent=2) if as_json else status_text(status))


def fetch_status(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """What the gateway at `url` answers to GET /tandem/status.

    Raises:
        NoWorker: it cannot be reached, or does not answer with a status.
    """
    try:
        answer = httpx.get(f"{url}/tandem/status", headers=headers, timeout=TIMEOUT_SECONDS)
        if answer.is_error:
            raise ValueError(refusal(answer))
        status = answer.json()
        if not isinstance(status, dict) or "workers" not in status:
            raise ValueError("the answer is not that of a gateway")
        return status
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoWorker(f"{url} gives no status: {error}") from error


def status_text(status: Mapping[str, Any]) -> str:
    """All of it for people: a table of workers, what is wrong with any, and a line for each other part."""
    workers = status["workers"]
    shown = table(_rows(workers), words=5) if workers else "no workers"
    lines = [figures_line(name, status[name]) for name in ("gateway", "queue", "ratio", "transfer") if name in status]
    return "\n".join([shown, *_complaints(workers), "", *lines])


def _rows(workers: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    yield ("worker", "role", "state", "pid", "address", "blocks", *_BLOCKS[1:], "running", "waiting")
    for worker in workers:
        addresses = worker["addresses"]
        named = addresses.values() if isinstance(addresses, Mapping) else addresses
        cells = [worker["id"], worker["role"], worker["state"], worker["pid"] or "-", ", ".join(map(str, named))]
        # Never heard of: zeros would look like figures.
        known = worker.get("age", 0) is not None
        figures = [*(worker["blocks"][name] for name in _BLOCKS), worker["running"], worker["waiting"]]
        yield [str(cell) for cell in (*cells, *(figures if known else "-" * len(figures)))]


def _complaints(workers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Why workers are lost or refused, and which of them refuse each other."""
    for worker in workers:
        if reason := worker.get("reason"):
            yield f"{worker['id']} is {worker['state']}: {reason}"
        for pair in worker.get("refused", ()):
            yield f"{worker['id']} does not pair with {pair}"


def figures_line(name: str, figures: Mapping[str, Any]) -> str:
    """`queue: waiting 3, running 2`; nested figures keep their outer name."""
    return f"{name}: {', '.join(_flat(figures))}"


def _flat(figures: Mapping[str, Any], prefix: str = "") -> list[str]:
    parts = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            parts += _flat(value, f"{prefix}{name}.")
        else:
            shown = short(value) if isinstance(value, float) else "-" if value is None else str(value)
            parts.append(f"{prefix}{name} {shown}")
    return parts
