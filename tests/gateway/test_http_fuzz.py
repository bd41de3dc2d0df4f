"""Whatever a client sends: an answer of the API's form, never a 5xx, and the next client is served.

Two sources of trouble: schemathesis over the gateway's own OpenAPI document, and bodies that work, broken in one place.
"""

import copy
import json
import string
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.accounting import EdgeMetrics
from gateway.http.app import HttpServices, create_app
from gateway.http.services import HttpOptions
from tests.gateway.edges import tiny_model
from tests.gateway.fakes import FakeDispatcher, answers
from tests.parity.features import load_features

#: What the routes may answer to a body.
EXPECTED = {200, 400, 404, 413, 415, 422}

Path = tuple[str | int, ...]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The HTTP application over a dispatcher that answers everything."""
    model = tiny_model(tmp_path_factory.mktemp("model"))
    dispatcher = FakeDispatcher(answers(model.tokenizer, "one two three"), max_request_tokens=2048)
    services = HttpServices(model, dispatcher, EdgeMetrics(CollectorRegistry()), lambda: (True, ""), HttpOptions())
    return create_app(services)


@pytest.mark.slow
def test_by_the_openapi_document(app: Any) -> None:
    """Every operation that the document describes, with requests that it allows."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
    for operation in operations:
        # A fixed order: the same cases in every run.
        @seed(0)
        @settings(max_examples=25, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            answer = case.call()
            assert answer.status_code < 500, answer.text
            check_form(answer.status_code, "".join(answer.headers.get("content-type", [])), answer.content)

        check()


def check_form(status: int, media_type: str, content: bytes) -> None:
    """An error is OpenAI's object; a stream is events, each of them JSON, and has an end."""
    if status >= 400:
        error = json.loads(content)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
        assert isinstance(error["type"], str)
    elif media_type.startswith("text/event-stream"):
        for event in content.decode().removesuffix("\n\n").split("\n\n"):
            *names, data = event.split("\n")
            assert all(name.startswith("event: ") for name in names)
            assert data == "data: [DONE]" or "error" not in json.loads(data.removeprefix("data: "))
    elif media_type.startswith("application/json"):
        assert "error" not in json.loads(content) or json.loads(content)["error"] is None


WORKING = [(feature.path, feature.request(salt="fuzz")) for feature in load_features().values()]
WORKING += [
    ("responses", {"model": "tiny", "input": "Hello"}),
    (
        "responses",
        {
            "model": "tiny",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
            "stream": True,
        },
    ),
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["", "auto", "none", "required", "json_object", "\ud800", "\x00", "a" * 5000, "😀"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(string.ascii_letters, max_size=6), inner, max_size=4)
    ),
    max_leaves=6,
)


def paths_of(value: Any, at: Path = ()) -> list[Path]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in inner for path in paths_of(item, (*at, key)))]


def replaced(value: Any, path: Sequence[str | int], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


@st.composite
def broken_bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A body that works, with one or two places replaced by something else."""
    path, body = draw(st.sampled_from(WORKING))
    body = {**body, "model": "tiny"}
    if draw(st.booleans()):
        body["stream"] = True
    for _ in range(draw(st.integers(1, 2))):
        body = replaced(body, draw(st.sampled_from(paths_of(body))), draw(json_values))
    return path, body


@pytest.fixture
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(request=broken_bodies())
async def test_broken_bodies(client: httpx.AsyncClient, request: tuple[str, Any]) -> None:
    path, body = request
    # Lone surrogates are sent as JSON escapes, as clients do that know no better.
    answer = await client.post(
        f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code in EXPECTED, answer.text
    check_form(answer.status_code, answer.headers.get("content-type", ""), answer.content)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
async def test_bytes_that_are_no_body(client: httpx.AsyncClient, content: bytes) -> None:
    for path in ("chat/completions", "completions", "responses"):
        answer = await client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        check_form(answer.status_code, "", answer.content)


HOSTILE = {
    "deep list": b'{"model":"tiny","prompt":' + b"[" * 200_000,
    "deep object": b'{"model":"tiny","prompt":"x","logit_bias":' + b'{"a":' * 100_000,
    "huge number": b'{"model":"tiny","prompt":"x","max_tokens":' + b"9" * 100_000 + b"}",
    "infinity": b'{"model":"tiny","prompt":"x","temperature":1e999}',
    "nan": b'{"model":"tiny","prompt":"x","temperature":NaN}',
    "many fields": b'{"model":"tiny","prompt":"x","prompt":"y"' + b',"a":1' * 50_000 + b"}",
    "byte order mark": b"\xef\xbb\xbf{}",
    "nothing": b"",
    "null": b"null",
    "list": b"[]",
    "text": b'"text"',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_bodies(client: httpx.AsyncClient, content: bytes) -> None:
    answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in {200, 400}, answer.text
    check_form(answer.status_code, "", answer.content)
