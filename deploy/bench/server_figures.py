"""What a Tandem server says of itself, before and after a level of load; nothing from other servers.

Counters of the gateway's /metrics (sums of histograms too), summed over their labels, as differences.
"""

from collections import defaultdict
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "tandem_"
#: Seconds from the first KV message to the landing of the last, and the part of it that compute did not hide.
TRANSFER = "tandem_gateway_transfer_seconds_total"
EXPOSED = "tandem_gateway_transfer_exposed_seconds_total"


async def read_counters(http: httpx.AsyncClient) -> dict[str, float]:
    """Tandem's counters by name; empty if the server is another one."""
    try:
        answer = await http.get("/metrics")
    except httpx.HTTPError:
        return {}
    return parse_counters(answer.text) if answer.is_success else {}


def parse_counters(text: str) -> dict[str, float]:
    """Counters in Prometheus' text form that begin with `PREFIX`, each summed over its labels."""
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith(("_total", "_sum", "_count")):
                totals[sample.name] += sample.value
    return dict(totals)


def server_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was counted in between, and `transfer_hidden_share` (0..1) if KV was transferred."""
    figures = {name: value - before.get(name, 0.0) for name, value in after.items()}
    moved = {name: round(value, 6) for name, value in figures.items() if value}
    if transfer := figures.get(TRANSFER):
        moved["transfer_hidden_share"] = round(max(0.0, 1 - figures.get(EXPOSED, 0.0) / transfer), 4)
    return moved
