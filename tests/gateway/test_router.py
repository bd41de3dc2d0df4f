"""The router's choices, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.router import PrefillPolicy, RouteQuery, Router, WorkerLoad


def decode(worker_id: str = "d0", **fields: object) -> WorkerLoad:
    defaults = {
        "address": f"{worker_id}:1",
        "prefill_speed": 1000.0,
        "decode_speed": 100.0,
        "free_blocks": 1000,
        "total_blocks": 1000,
        "max_request_tokens": 8192,
    }
    return WorkerLoad(worker_id, **{**defaults, **fields})  # type: ignore[arg-type]


def prefill(worker_id: str = "p0", **fields: object) -> WorkerLoad:
    return WorkerLoad(worker_id, **{"address": f"{worker_id}:1", "prefill_speed": 1000.0, **fields})  # type: ignore[arg-type]


QUERY = RouteQuery(prompt_tokens=1000, max_tokens=100)
ROUTER = Router(local_prefill_tokens=32)
#: A decode worker on which a local prefill would stall many streams.
BUSY = decode(requests=9)


@pytest.mark.parametrize(
    ("name", "query", "prefills", "d0", "wanted"),
    [
        ("no prefill worker: locally", QUERY, [], decode(), []),
        ("an idle prefill worker is asked", QUERY, [prefill()], decode(), ["p0"]),
        ("the shorter queue first", QUERY, [prefill("p0", queued_tokens=500), prefill("p1")], BUSY, ["p1", "p0"]),
        ("the warmer cache first", QUERY, [prefill("p0"), prefill("p1", overlap=512)], BUSY, ["p1", "p0"]),
        ("the faster first", QUERY, [prefill("p0"), prefill("p1", prefill_speed=2000.0)], BUSY, ["p1", "p0"]),
        ("equal ones by id", QUERY, [prefill("p1"), prefill("p0")], decode(), ["p0", "p1"]),
        ("short prompt: locally", RouteQuery(32, 100), [prefill()], decode(), []),
        ("one token more: remote", RouteQuery(33, 100), [prefill()], decode(), ["p0"]),
        ("short rest after the decode's own cache: locally", QUERY, [prefill()], decode(overlap=968), []),
        ("prefill far behind: locally", QUERY, [prefill(queued_tokens=20_000)], decode(), []),
        ("slightly behind: still remote", QUERY, [prefill(queued_tokens=200)], decode(), ["p0"]),
        ("a busy decode is not stalled", QUERY, [prefill(queued_tokens=2000)], BUSY, ["p0"]),
        ("refused by id", QUERY, [prefill("p0"), prefill("p1")], decode(refused=frozenset({"p0"})), ["p1"]),
        ("refused by address", QUERY, [prefill()], decode(refused=frozenset({"p0:1"})), []),
        ("refused from the other side", QUERY, [prefill(refused=frozenset({"d0"}))], decode(), []),
        ("nothing measured yet: remote", QUERY, [prefill(prefill_speed=0.0)], decode(prefill_speed=0.0), ["p0"]),
        (
            "a slow link counts",
            RouteQuery(1000, 100, kv_bytes_per_token=10_000_000),
            [prefill()],
            decode(),
            [],
        ),
    ],
)  # fmt: skip
def test_prefill_candidates(
    name: str, query: RouteQuery, prefills: list[WorkerLoad], d0: WorkerLoad, wanted: list[str]
) -> None:
    (route,) = ROUTER.rank(query, [d0], prefills)
    assert [candidate.worker_id for candidate in route.candidates] == wanted, name
    assert [candidate.address for candidate in route.candidates] == [f"{worker}:1" for worker in wanted]


@pytest.mark.parametrize(
    ("policy", "prefills", "d0", "wanted"),
    [
        (PrefillPolicy.REMOTE, [prefill(queued_tokens=20_000)], decode(), ["p0"]),
        (PrefillPolicy.REMOTE, [], decode(), []),
        (PrefillPolicy.REMOTE, [prefill()], decode(overlap=968), []),
        (PrefillPolicy.REMOTE, [prefill()], decode(refused=frozenset({"p0"})), []),
        (PrefillPolicy.LOCAL, [prefill()], BUSY, []),
    ],
)
def test_a_policy_overrules_estimates(
    policy: PrefillPolicy, prefills: list[WorkerLoad], d0: WorkerLoad, wanted: list[str]
) -> None:
    (route,) = Router(local_prefill_tokens=32, policy=policy).rank(QUERY, [d0], prefills)
    assert [candidate.worker_id for candidate in route.candidates] == wanted


@pytest.mark.parametrize(
    ("name", "decodes", "wanted"),
    [
        ("equal ones by id", [decode("d1"), decode("d0")], ["d0", "d1"]),
        ("fewer requests", [decode("d0", requests=5), decode("d1", requests=1)], ["d1", "d0"]),
        ("faster", [decode("d0"), decode("d1", decode_speed=200.0)], ["d1", "d0"]),
        ("holds the prefix", [decode("d0"), decode("d1", overlap=960)], ["d1", "d0"]),
        ("has blocks", [decode("d0", free_blocks=10), decode("d1", requests=1)], ["d1", "d0"]),
        ("cannot hold it: not at all", [decode("d0", max_request_tokens=1099), decode("d1", requests=9)], ["d1"]),
        ("just holds it", [decode("d0", max_request_tokens=1100)], ["d0"]),
        ("nobody", [], []),
    ],
)
def test_decode_order(name: str, decodes: list[WorkerLoad], wanted: list[str]) -> None:
    assert [route.worker_id for route in ROUTER.rank(QUERY, decodes, [])] == wanted, name


def test_uncached_tokens_are_those_of_who_computes() -> None:
    (remote,) = ROUTER.rank(QUERY, [decode(overlap=100)], [prefill(overlap=400)])
    (local,) = ROUTER.rank(QUERY, [decode(overlap=100)], [])
    assert (remote.uncached_tokens, local.uncached_tokens) == (600, 900)
    (whole,) = ROUTER.rank(QUERY, [decode(overlap=1000)], [])
    assert whole.uncached_tokens == 1


speeds = st.just(0.0) | st.floats(0.01, 1e6)
loads = st.builds(
    WorkerLoad,
    worker_id=st.sampled_from(["a", "b", "c", "d"]),
    address=st.just("x:1"),
    queued_tokens=st.integers(0, 10**6),
    prefill_speed=speeds,
    decode_speed=speeds,
    requests=st.integers(0, 1000),
    free_blocks=st.integers(0, 1000),
    block_size=st.integers(1, 128),
    max_request_tokens=st.integers(0, 10_000),
    overlap=st.integers(0, 10_000),
)
queries = st.builds(
    RouteQuery,
    prompt_tokens=st.integers(1, 10_000),
    max_tokens=st.integers(1, 1000),
    num_choices=st.integers(1, 8),
    kv_bytes_per_token=st.integers(0, 10**6),
)


@given(queries, st.lists(loads, max_size=4), st.lists(loads, max_size=4))
def test_every_worker_that_fits_is_ranked_once_at_finite_cost(
    query: RouteQuery, decodes: list[WorkerLoad], prefills: list[WorkerLoad]
) -> None:
    routes = ROUTER.rank(query, decodes, prefills)
    fitting = [d for d in decodes if query.prompt_tokens + query.max_tokens <= d.max_request_tokens]
    assert sorted(route.worker_id for route in routes) == sorted(d.worker_id for d in fitting)
    assert [route.cost for route in routes] == sorted(route.cost for route in routes)
    for route in routes:
        assert 0 <= route.cost < float("inf")
        assert 1 <= route.uncached_tokens <= query.prompt_tokens
        assert len(route.candidates) <= len(prefills)
