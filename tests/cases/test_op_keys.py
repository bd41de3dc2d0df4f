"""OP-03, OP-04 and KV-03: who may ask, from where, and what tenants see of each other."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import grpc
import pytest

from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.cases.case_data import KEY, MODEL, Case, post, token_array
from tests.cases.probes import SERVING, health_of
from tests.cases.replies import Reply, error_of
from tests.cases.sockets import call
from tests.cases.system import CONTROL, System, gateway_beside, seen_through
from tests.cases.twin import call_twin, twin_request
from tests.e2e.cluster import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ORIGIN = "http://localhost:5173"
#: Tenants of their own, beside the one of `KEY`.
TENANTS = {"one": "sk-first-key", "two": "sk-second-key"}


@pytest.fixture(scope="module")
def gateway_with_keys(shared_tiny: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The shared workers behind a gateway that wants a key and knows one web origin."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("".join(f"{name}:{key}\n" for name, key in TENANTS.items()), encoding="utf-8")
    options = {"api_key": KEY, "api_key_file": str(file), "cors_origin": ORIGIN}
    with gateway_beside(shared_tiny, "keyed", **options) as member:
        shared_tiny.note_processes()
        yield seen_through(shared_tiny, member, headers={"Authorization": f"Bearer {KEY}"})
    shared_tiny.note_processes()


@pytest.fixture
def keyed(gateway_with_keys: System, system: System) -> System:
    """ALIVE of the workers and of all gateways is checked after the test."""
    return gateway_with_keys


# --- OP-03: keys --------------------------------------------------------------------------------------

#: Documented: for load balancers and Prometheus.
OPEN = {"/health", "/ready", "/metrics"}
WRONG: dict[str, dict[str, str]] = {
    "none": {},
    "wrong": {"Authorization": "Bearer sk-wrong"},
    "basic": {"Authorization": f"Basic {KEY}"},
    "bare": {"Authorization": KEY},
    "longer": {"Authorization": f"Bearer {KEY}x"},
    "other header": {"X-Api-Key": KEY},
}
RIGHT: dict[str, dict[str, str]] = {
    "as documented": {"Authorization": f"Bearer {KEY}"},
    "lower case": {"Authorization": f"bearer {KEY}"},
}


def routes(system: System) -> list[tuple[str, str]]:
    """(method, path) of every route, out of the OpenAPI document, and the ways around it that the case tries."""
    answer = system.get("/openapi.json", headers=system.headers)
    documented = [
        (method.upper(), path.replace("{name}", MODEL).replace("{response_id}", "resp_1"))
        for path, methods in answer.json()["paths"].items()
        for method in methods
    ]
    assert ("POST", "/v1/chat/completions") in documented
    twisted = ["//v1/chat/completions", "/V1/chat/completions", "/v1/../v1/chat/completions", "/v1/chat/completions/"]
    others = ["/docs", "/redoc", "/openapi.json", "/tandem/status", "/invocations", "/v1/embeddings", "/generate"]
    return [*documented, *(("POST", path) for path in twisted), *(("GET", path) for path in others)]


def test_op_03_no_way_around_the_key(keyed: System) -> None:
    for method, path in routes(keyed):
        for name, headers in WRONG.items():
            status, answered, content = call(keyed.cluster.url, method, path, headers)
            if path in OPEN:
                assert status == 200, (method, path, name)
                continue
            assert status == 401, (method, path, name, status)
            assert answered["www-authenticate"].startswith("Bearer")
            assert error_of(json.loads(content))["code"] == "invalid_api_key"
    for query in (f"?api_key={KEY}", f"?key={KEY}"):
        assert call(keyed.cluster.url, "POST", f"/v1/completions{query}", {})[0] == 401
    assert call(keyed.cluster.url, "HEAD", "/v1/models", {})[0] == 401
    for headers in RIGHT.values():
        assert call(keyed.cluster.url, "GET", "/v1/models", headers)[0] == 200
        assert call(keyed.cluster.url, "HEAD", "/v1/models", headers)[0] == 200


def test_op_03_grpc_wants_the_key(keyed: System) -> None:
    request = twin_request(CONTROL)
    target = keyed.cluster.grpc_target
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    for headers in WRONG.values():
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        for message in (request, chat):
            assert call_twin(target, message, metadata=metadata).code is grpc.StatusCode.UNAUTHENTICATED
        with grpc.insecure_channel(target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.Tokenize(inference_pb2.TokenizeRequest(text="secret"), timeout=PATIENCE, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for headers in RIGHT.values():
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        assert call_twin(target, request, metadata=metadata).texts == {0: keyed.control_text}
    # Probes are open.
    assert health_of(target) == SERVING


def test_op_03_the_key_is_shown_nowhere(keyed: System) -> None:
    cluster = keyed.cluster
    assert keyed.send(CONTROL).text == keyed.control_text
    wrong = keyed.send(CONTROL, headers={"Authorization": "Bearer sk-mistyped"})
    shown = [wrong.raw.decode(), cluster.metrics("gateway"), cluster.members["gateway"].log.read_text()]
    assert not any(secret in text for text in shown for secret in (KEY, "sk-mistyped"))


# --- OP-04: web origins -------------------------------------------------------------------------------


def test_op_04_browsers_may_ask(keyed: System, cases: Mapping[str, Case]) -> None:
    plain = replace(keyed, headers={})
    replies = plain.run(cases["OP-04"])
    preflight = replies["preflight without key"]
    assert preflight.status in (200, 204)
    assert preflight.headers["Access-Control-Allow-Origin"] in (ORIGIN, "*")
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    allowed = {name.strip() for name in preflight.headers["Access-Control-Allow-Headers"].lower().split(",")}
    assert allowed == {"*"} or {"authorization", "content-type", "x-stainless-lang"} <= allowed
    stream, unauthorized = replies["stream"], replies["401 answer"]
    assert stream.status == 200 and stream.finish_reason
    assert unauthorized.status == 401 and unauthorized.error
    for reply in (stream, unauthorized):
        assert reply.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "Access-Control-Allow-Origin" not in replies["origin not allowed"].headers
    for reply in replies.values():
        assert reply.headers.get("Access-Control-Allow-Credentials") != "true" or (
            reply.headers.get("Access-Control-Allow-Origin") != "*"
        )
    replies.assert_all_judged()


def test_op_04_off_by_default(system: System, cases: Mapping[str, Case]) -> None:
    for reply in system.run(cases["OP-04"]).values():
        assert not [name for name in reply.headers if name.startswith("access-control-")]


# --- KV-03: tenants -----------------------------------------------------------------------------------


def test_kv_03_another_key_shares_no_hits(keyed: System) -> None:
    """Tenants are kept apart by key, whatever salt they send."""

    def ask(tenant: str) -> Reply:
        body = {"prompt": token_array(8 * keyed.block_size, seed=34), "max_tokens": 1, "cache_salt": "tenant-a"}
        return keyed.send(post("/v1/completions", body), headers={"Authorization": f"Bearer {TENANTS[tenant]}"})

    assert ask("one").cached_tokens == 0
    assert ask("two").cached_tokens == 0
    assert ask("one").cached_tokens > 0
