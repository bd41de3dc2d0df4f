"""Every Redis key of Tandem, so that the data model can be read at once. Knows no client.

All keys of one model share the hash tag `{model}`, so a Redis Cluster keeps them in one slot and one Lua script may
touch them together.
"""

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one served model."""

    #: Name under which the model is served.
    model: str

    @property
    def _prefix(self) -> str:
        # A brace inside the name would end the hash tag early.
        return f"tandem:{{{quote(self.model, safe='/.-_')}}}"

    @property
    def _queue(self) -> str:
        # The number is that of the entries' format, which the Lua scripts know: gateways of two versions that share a
        # Redis during an upgrade must not read each other's entries, and count what they admit apart meanwhile.
        return f"{self._prefix}:queue2"

    @property
    def workers(self) -> str:
        """Hash: worker id -> WorkerRecord as JSON."""
        return f"{self._prefix}:workers"

    def heartbeat(self, worker_id: str) -> str:
        """String with a time to live: the incarnation that announced itself last."""
        return f"{self._prefix}:worker:{worker_id}:heartbeat"

    @property
    def gateways(self) -> str:
        """Sorted set: gateway id -> end of its lease, milliseconds of the server's clock."""
        return f"{self._queue}:gateways"

    @property
    def entries(self) -> str:
        """Hash: request id -> waiting entry as JSON."""
        return f"{self._queue}:entries"

    @property
    def order(self) -> str:
        """Sorted set, all scores 0: class, tenant, priority, arrival and request id, ordered as text."""
        return f"{self._queue}:order"

    def active(self, request_class: str) -> str:
        """Sorted set: tenant with waiting entries of that class -> its virtual time."""
        return f"{self._queue}:active:{request_class}"

    def idle(self, request_class: str) -> str:
        """Hash: tenant that waits for nothing now -> its virtual time, kept while others of the class wait."""
        return f"{self._queue}:idle:{request_class}"

    @property
    def grants(self) -> str:
        """Hash: request id -> admitted request as JSON."""
        return f"{self._queue}:grants"

    @property
    def meta(self) -> str:
        """Hash: counters and virtual clocks."""
        return f"{self._queue}:meta"

    def wake(self, gateway_id: str) -> str:
        """Channel on which a gateway hears that another one's step admitted a request of its own."""
        return f"{self._queue}:wake:{gateway_id}"

    def response(self, tenant: str, response_id: str) -> str:
        """String with a time to live: a stored response and its input as JSON."""
        return f"{self._prefix}:response:{quote(tenant, safe='')}:{response_id}"
