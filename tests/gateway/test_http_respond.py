"""What becomes of an answer whose client leaves, or stops reading, at any place of it: told as ASGI tells it."""

import asyncio
import json
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.errors import NoWorker
from common.sampling import FinishReason
from gateway.accounting import EdgeMetrics
from gateway.generation import GenerationRequest
from gateway.http.app import create_app
from gateway.http.services import HttpOptions, HttpServices
from gateway.serving import ServingModel
from tests.gateway.edges import tiny_model
from tests.gateway.fakes import FakeDispatcher, Script, deltas

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 9000, "logprobs": 5}

Message = MutableMapping[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass(slots=True)
class Client:
    """Sends one request and takes the answer."""

    body: dict[str, Any]
    parts: list[bytes] = field(default_factory=list)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    #: Reads nothing once a part has this in it.
    stops_reading_at: bytes | None = None
    #: Leaves with so many parts.
    leaves_after: int | None = None
    complete: bool = False
    _asked: bool = False

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            return
        part = message["body"]
        if self.stops_reading_at is not None and self.stops_reading_at in part:
            await asyncio.Event().wait()
        self.parts.append(part)
        self.complete = not message.get("more_body", False)
        if len(self.parts) == self.leaves_after:
            self.leaving.set()
        await asyncio.sleep(0)


async def ask(
    model: ServingModel, script: Callable[[GenerationRequest], Script], client: Client, **options: float
) -> dict[str, float]:
    """Requests by status, once the application has returned."""
    dispatcher = FakeDispatcher(script, max_request_tokens=10_000)
    metrics = EdgeMetrics(CollectorRegistry())
    app = create_app(HttpServices(model, dispatcher, metrics, lambda: (True, ""), HttpOptions(**options)))
    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    async with asyncio.timeout(20):
        await app(scope, client.receive, client.send)
    assert dispatcher.all_closed
    assert metrics.registry.get_sample_value("tandem_gateway_requests_running", {"route": PATH}) == 0
    found = [sample for metric in metrics.registry.collect() for sample in metric.samples]
    return {sample.labels["status"]: sample.value for sample in found if sample.name == "tandem_gateway_requests_total"}


def long_answer(request: GenerationRequest) -> Script:
    return deltas([65] * 9000, finish=FinishReason.LENGTH, per_delta=50, logprobs=5)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_between_parts_gets_no_more_of_them(model: ServingModel, stream: bool) -> None:
    client = Client(BODY | {"stream": stream}, leaves_after=2)
    assert await ask(model, long_answer, client) == {"499": 1.0}
    assert 2 <= len(client.parts) < 5
    assert not client.complete


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stays_gets_all(model: ServingModel, stream: bool) -> None:
    client = Client(BODY | {"stream": stream})
    assert await ask(model, long_answer, client) == {"200": 1.0}
    assert client.complete
    assert len(client.parts) > 5


@pytest.mark.parametrize("error", [NoWorker("gone"), RuntimeError("broken")])
async def test_a_client_that_does_not_read_what_went_wrong_is_cut(model: ServingModel, error: Exception) -> None:
    """The failure keeps its status, and nothing else fails because of the client."""
    client = Client(BODY | {"stream": True}, stops_reading_at=b'"error"')
    script: Script = [*deltas([65, 66], finish=None, logprobs=5), error]
    status = "503" if isinstance(error, NoWorker) else "500"
    assert await ask(model, lambda request: script, client, write_timeout=0.05) == {status: 1.0}
    assert client.parts
    assert not client.complete
