"""Going on from stored responses, who may read them, and what is stored at all."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from common.errors import NoWorker, StoreUnavailable
from gateway.generation import GenerationRequest
from gateway.http.responses.memory_store import MemoryStore
from gateway.http.responses.store import NoStore, StoredResponse
from gateway.serving import ServingModel
from gateway.tenants import ApiKeys, KeyLine
from tests.factories.http import NO_TLS
from tests.gateway.edges import running_http, tiny_model
from tests.gateway.fakes import FakeDispatcher, Script, answers, deltas

URL = "/v1/responses"
ANSWER = "one two"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dispatcher(model: ServingModel) -> FakeDispatcher:
    return FakeDispatcher(answers(model.tokenizer, ANSWER), max_request_tokens=1000)


@asynccontextmanager
async def serving(model: ServingModel, dispatcher: FakeDispatcher, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running_http(model, dispatcher, **options) as edge,
        httpx.AsyncClient(base_url=edge.url, verify=NO_TLS, timeout=20) as client,
    ):
        yield client


@pytest.fixture
async def client(model: ServingModel, dispatcher: FakeDispatcher) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(model, dispatcher) as client:
        yield client


async def created(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"input": "hi"} | body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def rendered(model: ServingModel, *messages: tuple[str, str]) -> tuple[int, ...]:
    turns = [{"role": role, "content": content} for role, content in messages]
    return tuple(model.tokenizer.encode(model.template.render(turns), add_special_tokens=False))


async def test_a_conversation_goes_on(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    first = await created(client, instructions="Be brief.")
    second = await created(client, input="more", previous_response_id=first["id"])
    third = await created(client, input="again", previous_response_id=second["id"], instructions="Be loud.")
    assert [request.prompt_ids for request in dispatcher.requests] == [
        rendered(model, ("system", "Be brief."), ("user", "hi")),
        rendered(model, ("user", "hi"), ("assistant", ANSWER), ("user", "more")),
        rendered(
            model,
            ("system", "Be loud."),
            ("user", "hi"),
            ("assistant", ANSWER),
            ("user", "more"),
            ("assistant", ANSWER),
            ("user", "again"),
        ),
    ]
    assert (second["previous_response_id"], second["instructions"]) == (first["id"], None)
    listed = (await client.get(f"{URL}/{third['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert [(item["role"], item["content"][0]["text"]) for item in listed] == [
        ("user", "hi"),
        ("assistant", ANSWER),
        ("user", "more"),
        ("assistant", ANSWER),
        ("user", "again"),
    ]
    assert listed[1]["id"] == first["output"][0]["id"]


async def test_two_can_go_on_from_the_same(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    first = await created(client)
    for text in ("this", "that"):
        await created(client, input=text, previous_response_id=first["id"])
        expected = rendered(model, ("user", "hi"), ("assistant", ANSWER), ("user", text))
        assert dispatcher.requests[-1].prompt_ids == expected


async def test_output_can_be_sent_back_by_hand(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    """The other way to go on: what came out, as it is, goes back in."""
    first = await created(client, store=False)
    items = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "more"}]
    await created(client, input=items)
    expected = rendered(model, ("user", "hi"), ("assistant", ANSWER), ("user", "more"))
    assert dispatcher.requests[-1].prompt_ids == expected


async def test_retrieve_and_delete(client: httpx.AsyncClient) -> None:
    reply = await created(client, metadata={"a": "b"}, user="u")
    assert reply["store"] is True
    got = await client.get(f"{URL}/{reply['id']}")
    assert (got.status_code, got.json()) == (200, reply)
    deleted = await client.delete(f"{URL}/{reply['id']}")
    assert deleted.json() == {"id": reply["id"], "object": "response", "deleted": True}
    for response in (
        await client.get(f"{URL}/{reply['id']}"),
        await client.delete(f"{URL}/{reply['id']}"),
        await client.get(f"{URL}/{reply['id']}/input_items"),
        await client.post(f"{URL}/{reply['id']}/cancel"),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "response_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_not_stored_if_not_wanted(client: httpx.AsyncClient, stream: bool) -> None:
    if stream:
        text = (await client.post(URL, json={"input": "hi", "store": False, "stream": True})).text
        assert '"store":false' in text and '"store":true' not in text
        response_id = "resp_" + text.split("resp_")[1][:32]
    else:
        reply = await created(client, store=False)
        assert reply["store"] is False
        response_id = reply["id"]
    assert (await client.get(f"{URL}/{response_id}")).status_code == 404
    refused = await client.post(URL, json={"input": "x", "previous_response_id": response_id})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_a_server_that_stores_nothing(model: ServingModel, dispatcher: FakeDispatcher) -> None:
    async with serving(model, dispatcher, responses=NoStore()) as client:
        reply = await created(client, store=True)
        assert reply["store"] is False
        refused = await client.post(URL, json={"input": "x", "previous_response_id": reply["id"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        assert (await client.get(f"{URL}/{reply['id']}")).status_code == 404


class AwayStore(MemoryStore):
    """Can neither keep nor tell anything."""

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        return False

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        raise StoreUnavailable("away")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_does_not_fail_because_it_cannot_be_stored(
    model: ServingModel, dispatcher: FakeDispatcher, stream: bool
) -> None:
    async with serving(model, dispatcher, responses=AwayStore()) as client:
        response = await client.post(URL, json={"input": "hi", "stream": stream})
        assert response.status_code == 200
        last = response.text.split("event: ")[-1]
        assert '"store":false' in last and ANSWER in last
        for asked in (
            await client.get(f"{URL}/resp_{'0' * 32}"),
            await client.post(URL, json={"input": "x", "previous_response_id": f"resp_{'0' * 32}"}),
        ):
            assert (asked.status_code, asked.json()["error"]["code"]) == (503, "store_unavailable")
            assert asked.headers["retry-after"] == "1"


async def test_tenants_have_their_own_responses(model: ServingModel, dispatcher: FakeDispatcher) -> None:
    keys = ApiKeys([KeyLine("key-a", "ada"), KeyLine("key-b", "bob"), KeyLine("key-c", "ada")])
    async with serving(model, dispatcher, keys=keys) as client:
        ada, bob, also_ada = ({"Authorization": f"Bearer key-{name}"} for name in "abc")
        response_id = (await client.post(URL, json={"input": "hi"}, headers=ada)).json()["id"]
        path = f"{URL}/{response_id}"
        assert (await client.get(path, headers=bob)).status_code == 404
        assert (await client.delete(path, headers=bob)).status_code == 404
        assert (await client.get(f"{path}/input_items", headers=bob)).status_code == 404
        body = {"input": "x", "previous_response_id": response_id}
        assert (await client.post(URL, json=body, headers=bob)).status_code == 400
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=also_ada)).status_code == 200
        assert (await client.post(URL, json=body, headers=ada)).status_code == 200


async def test_pages_of_input_items(client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": str(index), "id": f"msg_{index}"} for index in range(25)]
    reply = await created(client, input=items)
    path = f"{URL}/{reply['id']}/input_items"

    async def page(**query: Any) -> tuple[list[str], bool]:
        body = (await client.get(path, params=query)).json()
        ids = [item["id"] for item in body["data"]]
        assert (body["object"], body["first_id"], body["last_id"]) == ("list", ids[0], ids[-1])
        return ids, body["has_more"]

    forward = [f"msg_{index}" for index in range(25)]
    assert await page() == (forward[:4:-1], True)
    assert await page(after="msg_5") == (forward[4::-1], False)
    assert await page(order="asc", limit=3) == (forward[:3], True)
    assert await page(order="asc", limit=3, after="msg_2") == (forward[3:6], True)
    assert await page(order="asc", limit=100) == (forward, False)
    for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"limit": "²"}, {"order": "up"}, {"after": "no"}):
        refused = await client.get(path, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(query)))


async def test_what_only_runs_in_the_background_cannot_be_asked_for(client: httpx.AsyncClient) -> None:
    reply = await created(client)
    assert (await client.post(f"{URL}/{reply['id']}/cancel")).status_code == 400
    refused = await client.get(f"{URL}/{reply['id']}", params={"stream": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert (await client.get(f"{URL}/{reply['id']}", params={"stream": "false"})).status_code == 200


async def test_failed_ones_are_no_ground_to_go_on_from(model: ServingModel) -> None:
    def breaks(request: GenerationRequest) -> Script:
        return [*deltas(model.tokenizer.encode("one"), finish=None), NoWorker("gone")]

    async with serving(model, FakeDispatcher(breaks)) as client:
        text = (await client.post(URL, json={"input": "hi", "stream": True})).text
        response_id = "resp_" + text.split("resp_")[1][:32]
        stored = (await client.get(f"{URL}/{response_id}")).json()
        assert (stored["status"], stored["error"]["code"]) == ("failed", "server_error")
        assert stored["output"][0]["content"][0]["text"] == "one"
        refused = await client.post(URL, json={"input": "x", "previous_response_id": response_id})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


async def test_cut_off_ones_can_be_gone_on_from(
    client: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServingModel
) -> None:
    first = await created(client, max_output_tokens=1)
    assert (first["status"], first["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert first["output"][0]["status"] == "incomplete"
    await created(client, input="more", previous_response_id=first["id"])
    said = first["output"][0]["content"][0]["text"]
    expected = rendered(model, ("user", "hi"), ("assistant", said), ("user", "more"))
    assert dispatcher.requests[-1].prompt_ids == expected
