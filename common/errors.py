"""The one exception tree. Edges turn it into HTTP and gRPC statuses by one table each.

A user's mistake is an `InvalidRequest` naming the field; a shortage is usually a return value and becomes an
exception only at the edge that must answer it; a broken invariant is an assertion and never appears here.
Status names are strings, equal to gRPC's, so that this module (and all that imports it) needs no gRPC.
"""

from typing import ClassVar


class TandemError(Exception):
    """Base of all errors that a caller may see.

    Attributes:
        status: gRPC status name, mapped at the edges.
        code: short machine-readable word (OpenAI's `error.code`).
        field: offending request field, if one is to blame.
        retry_after: seconds after which trying again makes sense, if known.
    """

    status: ClassVar[str] = "INTERNAL"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code if code is not None else self.default_code
        self.retry_after = retry_after


# --- the caller's mistakes -------------------------------------------------------------------------


class InvalidRequest(TandemError):
    """The request is malformed or can never be served; `field` names what is wrong."""

    status = "INVALID_ARGUMENT"


class ContextTooLong(InvalidRequest):
    """Prompt and output together exceed what the model or the workers can hold."""

    default_code = "context_length_exceeded"


class PayloadTooLarge(TandemError):
    """The body exceeds the documented limit."""

    status = "RESOURCE_EXHAUSTED"
    default_code = "payload_too_large"


class NotFound(TandemError):
    """No such model, path or object."""

    status = "NOT_FOUND"


class Unauthenticated(TandemError):
    """No valid key."""

    status = "UNAUTHENTICATED"
    default_code = "invalid_api_key"


# --- shortages and losses --------------------------------------------------------------------------


class RateLimited(TandemError):
    """A tenant's limit; other tenants are served."""

    status = "RESOURCE_EXHAUSTED"
    default_code = "rate_limit_exceeded"


class Overloaded(TandemError):
    """The queue is full, or every worker is."""

    status = "UNAVAILABLE"
    default_code = "overloaded"


class NoWorker(TandemError):
    """No worker is left that could serve the request."""

    status = "UNAVAILABLE"
    default_code = "no_worker"


class StoreUnavailable(TandemError):
    """What was stored cannot be reached now; nothing is said about whether it exists."""

    status = "UNAVAILABLE"
    default_code = "store_unavailable"


class DeadlineExceeded(TandemError):
    """The request's own time limit ran out."""

    status = "DEADLINE_EXCEEDED"
    default_code = "timeout"


class Cancelled(TandemError):
    """The caller went away."""

    status = "CANCELLED"


class ManifestMismatch(TandemError):
    """Two workers that must agree do not; the message names field and both values."""

    status = "FAILED_PRECONDITION"
    default_code = "manifest_mismatch"


class ConfigError(TandemError):
    """An option has a value that cannot work; reported in one line before anything starts."""

    status = "INVALID_ARGUMENT"


class ModelError(TandemError):
    """A model folder that cannot be loaded: unknown architecture, missing weights, wrong shapes."""

    status = "FAILED_PRECONDITION"
