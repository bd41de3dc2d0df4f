"""What one client request did, and where that is told: metrics and one log line. Never holds text of anybody."""

import logging
import re
import time
import uuid
from collections.abc import Hashable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.generation import GenerationStats
from gateway.tenants import EVERYBODY, Tenant

REQUEST_LOG = logging.getLogger("tandem.gateway.requests")

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


#: What a client may choose as its request id: it goes into logs and a header.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(given: str) -> str:
    """The client's own id (X-Request-Id) if it is harmless, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class EdgeMetrics:
    """The gateway's view of its clients, HTTP and gRPC alike. Durations in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.running = Gauge(
            "tandem_gateway_requests_running", "Client requests being answered", ["route"], registry=registry
        )
        self.requests = Counter(
            "tandem_gateway_requests_total",
            "Client requests by route and status (HTTP code, or gRPC status name); 499 and CANCELLED: the client left",
            ["route", "status"],
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "tandem_gateway_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "tandem_gateway_inter_token_seconds",
            "Between two tokens of a choice (an interval with several tokens is shared among them)",
            ["route"],
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "tandem_gateway_request_seconds",
            "From the arrival of a request to the end of its answer",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "tandem_gateway_prompt_tokens_total", "Prompt tokens of accepted requests", registry=registry
        )
        self.cached_tokens = Counter(
            "tandem_gateway_cached_prompt_tokens_total", "Prompt tokens that no worker computed", registry=registry
        )
        self.output_tokens = Counter("tandem_gateway_output_tokens_total", "Tokens given to clients", registry=registry)


class RequestRecord:
    """Follows one client request from arrival to end; `finish` tells it once."""

    def __init__(self, metrics: EdgeMetrics, request_id: str, route: str, tenant: Tenant = EVERYBODY) -> None:
        self._metrics = metrics
        self.request_id = request_id
        self.route = route
        #: Whose request it is; an edge may learn it only after the record has begun.
        self.tenant = tenant
        self._started = time.monotonic()
        self._first_token_at: float | None = None
        self._last_token_at: dict[Hashable, float] = {}
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._cached_tokens = 0
        self._stats: list[GenerationStats] = []
        self._status: str | None = None
        metrics.running.labels(route).inc()

    def prompt_accepted(self, tokens: int) -> None:
        self._prompt_tokens += tokens
        self._metrics.prompt_tokens.inc(tokens)

    def tokens_arrived(self, count: int, *, stream: Hashable) -> None:
        """`count` new tokens of one choice; `stream` tells choices apart."""
        if not count:
            return
        now = time.monotonic()
        if self._first_token_at is None:
            self._first_token_at = now
            self._metrics.time_to_first_token.labels(self.route).observe(now - self._started)
        if (before := self._last_token_at.get(stream)) is not None:
            histogram = self._metrics.inter_token.labels(self.route)
            for _ in range(count):
                histogram.observe((now - before) / count)
        self._last_token_at[stream] = now
        self._output_tokens += count
        self._metrics.output_tokens.inc(count)

    def generation_ended(self, cached_tokens: int, stats: GenerationStats | None) -> None:
        self._cached_tokens += cached_tokens
        self._metrics.cached_tokens.inc(cached_tokens)
        if stats is not None:
            self._stats.append(stats)

    def finish(self, status: str) -> str:
        """Idempotent: the first status counts, and is returned."""
        if self._status is not None:
            return self._status
        self._status = status
        seconds = time.monotonic() - self._started
        self._metrics.running.labels(self.route).dec()
        self._metrics.requests.labels(self.route, status).inc()
        self._metrics.duration.labels(self.route).observe(seconds)
        REQUEST_LOG.info("request", extra=self._figures(status, seconds))
        return status

    def _figures(self, status: str, seconds: float) -> dict[str, object]:
        """Fields of the log line; figures of the workers only where they are simple (one generation)."""
        first = None if self._first_token_at is None else round(self._first_token_at - self._started, 4)
        figures: dict[str, object] = {
            "request_id": self.request_id,
            "route": self.route,
            "tenant": self.tenant.name,
            "status": status,
            "seconds": round(seconds, 4),
            "ttft": first,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "output_tokens": self._output_tokens,
        }
        if len(self._stats) == 1:
            figures["generation"] = dict(self._stats[0].details)
        return figures
