"""What the HTTP edge is built from. Values and callables handed in; nothing global."""

from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.trace import Tracer

from gateway.accounting import EdgeMetrics
from gateway.generation import Dispatcher
from gateway.http.responses.memory_store import MemoryStore
from gateway.http.responses.store import ResponseStore
from gateway.serving import ServingModel
from gateway.tenants import ApiKeys

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Limits and switches of the HTTP edge."""

    #: Longest request body; 413 above. The gRPC edge should use the same.
    max_body_bytes: int = 8 * MEBIBYTE
    #: Seconds within which a request body must have arrived; 408 after.
    body_timeout: float = 60.0
    #: Seconds that a client may leave a full socket unread before its stream is cut.
    write_timeout: float = 120.0
    #: Web origins that browsers may call from; none: no CORS headers.
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HttpServices:
    """What handlers need."""

    model: ServingModel
    dispatcher: Dispatcher
    metrics: EdgeMetrics
    #: (whether requests can be served, why not).
    ready: Callable[[], tuple[bool, str]]
    options: HttpOptions = field(default_factory=HttpOptions)
    #: Makes the server spans; the default one does nothing unless a global provider is set.
    tracer: Tracer = field(default_factory=lambda: trace.get_tracer("tandem.gateway"))
    #: Who may call; none: everybody.
    keys: ApiKeys = field(default_factory=ApiKeys)
    #: Where answers of the Responses API are kept.
    responses: ResponseStore = field(default_factory=MemoryStore)
