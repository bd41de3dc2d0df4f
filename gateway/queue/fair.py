"""The order of admission, in plain Python: the policy of the local queue, and the reference for the Lua scripts.

Tenants of one class share by virtual time: each admission moves its tenant's clock on by cost / weight, and the tenant
whose clock is furthest behind goes next. A tenant that comes back does not get the time it was away for as credit.
Interactive requests go first, but while batch requests wait they get a tenth of what is admitted. The head is never
passed over by something smaller, so a large request cannot starve; one larger than the whole capacity goes alone.

Within its own line, the requests of one class, a tenant says what goes first: a lower priority, then who came first.
What it prefers costs nobody else anything, and its own requests of high number wait for as long as it prefers others.

It knows no clock, no task and no Redis. Numbers are integers so that Lua, whose numbers are doubles, gets the same.
"""

from bisect import insort
from dataclasses import dataclass, field

from gateway.generation import RequestClass
from gateway.queue.interface import Entry

#: Virtual time of one prompt token at weight 1; the precision with which weights are kept.
VIRTUAL_UNIT = 1000
#: Interactive tokens admitted for each batch token while both wait.
BATCH_DIVISOR = 9


#: (priority, arrival, request id): where an entry stands in its tenant's line.
_Place = tuple[int, int, str]


def _place(entry: Entry) -> _Place:
    return entry.priority, entry.arrival, entry.request_id


@dataclass(slots=True)
class _Class:
    """Waiting entries of one class."""

    #: Tenant -> places, sorted; only tenants that wait for something.
    lines: dict[str, list[_Place]] = field(default_factory=dict)
    #: Tenant -> virtual time; also of those that wait for nothing, while anyone of the class waits.
    times: dict[str, int] = field(default_factory=dict)
    #: Virtual time at which the last admitted entry started.
    clock: int = 0

    def add(self, entry: Entry) -> None:
        if entry.tenant not in self.lines:
            self.lines[entry.tenant] = []
            self.times[entry.tenant] = max(self.times.get(entry.tenant, 0), self.clock)
        insort(self.lines[entry.tenant], _place(entry))

    def remove(self, entry: Entry) -> None:
        line = self.lines[entry.tenant]
        line.remove(_place(entry))
        if not line:
            del self.lines[entry.tenant]
        if not self.lines:
            self.times.clear()
            self.clock = 0

    def head(self) -> str | None:
        """Request id that goes next."""
        if not self.lines:
            return None
        tenant = min(self.lines, key=lambda name: (self.times[name], name.encode()))
        return self.lines[tenant][0][-1]

    def charge(self, entry: Entry) -> None:
        """Move the clocks on for an entry that is about to be admitted."""
        self.clock = self.times[entry.tenant]
        self.times[entry.tenant] += entry.cost * VIRTUAL_UNIT // entry.weight


class FairQueue:
    """Waiting entries and grants. Synchronous; every method leaves both consistent."""

    def __init__(self) -> None:
        self.waiting: dict[str, Entry] = {}
        self.granted: dict[str, Entry] = {}
        self._classes = {request_class: _Class() for request_class in RequestClass}
        # Interactive tokens admitted while batch requests waited, less those that batch was given for them.
        self._credit = 0

    @property
    def waiting_cost(self) -> int:
        return sum(entry.cost for entry in self.waiting.values())

    @property
    def granted_cost(self) -> int:
        return sum(entry.cost for entry in self.granted.values())

    def enqueue(self, entry: Entry, capacity: int, max_waiting: int) -> tuple[bool, list[Entry]]:
        """Add an entry unless the queue is full; returns (taken, newly admitted entries)."""
        if entry.request_id in self.waiting or entry.request_id in self.granted:
            return True, self.admit(capacity)
        self.add(entry)
        admitted = self.admit(capacity)
        if entry.request_id in self.waiting and len(self.waiting) > max_waiting:
            self.remove(entry.request_id)
            return False, admitted
        return True, admitted

    def add(self, entry: Entry) -> None:
        """Add a waiting entry, whatever the bound."""
        self.waiting[entry.request_id] = entry
        self._classes[entry.request_class].add(entry)

    def add_granted(self, entry: Entry) -> None:
        """Count an entry as admitted that was so elsewhere."""
        self.remove(entry.request_id)
        self.granted[entry.request_id] = entry

    def remove(self, request_id: str) -> None:
        """Forget an entry or a grant; unknown ids are fine."""
        self.granted.pop(request_id, None)
        entry = self.waiting.pop(request_id, None)
        if entry is not None:
            self._classes[entry.request_class].remove(entry)

    def remove_gateway(self, gateway: str) -> None:
        """Forget all that one gateway holds."""
        for entry in [*self.waiting.values(), *self.granted.values()]:
            if entry.gateway == gateway:
                self.remove(entry.request_id)

    def admit(self, capacity: int) -> list[Entry]:
        """Admit heads while they fit into `capacity` prompt tokens; returns them in order."""
        admitted: list[Entry] = []
        granted_cost = self.granted_cost
        while (entry := self._head()) is not None:
            if self.granted and granted_cost + entry.cost > capacity:
                break
            self._grant(entry)
            granted_cost += entry.cost
            admitted.append(entry)
        return admitted

    def _head(self) -> Entry | None:
        interactive = self._classes[RequestClass.INTERACTIVE].head()
        batch = self._classes[RequestClass.BATCH].head()
        if batch is None:
            return None if interactive is None else self.waiting[interactive]
        if interactive is None or self._credit >= BATCH_DIVISOR * self.waiting[batch].cost:
            return self.waiting[batch]
        return self.waiting[interactive]

    def _grant(self, entry: Entry) -> None:
        if entry.request_class is RequestClass.BATCH:
            self._credit = max(0, self._credit - BATCH_DIVISOR * entry.cost)
        elif self._classes[RequestClass.BATCH].lines:
            self._credit += entry.cost
        else:
            self._credit = 0
        self._classes[entry.request_class].charge(entry)
        self.remove(entry.request_id)
        self.granted[entry.request_id] = entry
