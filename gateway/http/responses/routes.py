"""The routes of the Responses API: create, count, read, delete, and list the input of stored responses."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from common.errors import InvalidRequest, NotFound
from gateway.http.body import openapi_body, read_body
from gateway.http.formats import Json
from gateway.http.json_body import json_bytes
from gateway.http.respond import GenerationResponse
from gateway.http.responses.paging import page
from gateway.http.responses.request import ResponseCall, response_call
from gateway.http.responses.schemas import ResponseBody
from gateway.http.responses.store import StoredResponse, find
from gateway.http.services import HttpServices
from gateway.tenants import DEFAULT_TENANT


def responses_router(services: HttpServices) -> APIRouter:
    """Routes under /v1/responses, over the given services."""
    router = APIRouter(prefix="/v1/responses")
    store, options = services.responses, services.options

    async def stored(request: Request, response_id: str) -> StoredResponse:
        found = await find(store, _tenant(request), response_id)
        if found is None:
            raise _not_found(response_id)
        return found

    async def read(request: Request) -> ResponseCall:
        body = await read_body(
            request, ResponseBody, max_bytes=options.max_body_bytes, max_seconds=options.body_timeout
        )
        return await response_call(body, services.model, services.dispatcher.limits(), store, _tenant(request))

    @router.post("", openapi_extra=openapi_body(ResponseBody), response_class=Response)
    async def create(request: Request) -> Response:
        call = await read(request)
        return GenerationResponse(services, [call.prepared], call.writer, request.state.record, stream=call.stream)

    @router.post("/input_tokens", openapi_extra=openapi_body(ResponseBody))
    async def count_input_tokens(request: Request) -> Json:
        call = await read(request)
        return {"object": "response.input_tokens", "input_tokens": len(call.prepared.generation.prompt_ids)}

    @router.get("/{response_id}", response_class=Response)
    async def retrieve(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise InvalidRequest(
                "stream: only running responses are streamed", field="stream", code="unsupported_parameter"
            )
        return _json((await stored(request, response_id)).response)

    @router.delete("/{response_id}")
    async def delete(request: Request, response_id: str) -> Json:
        await stored(request, response_id)
        await store.delete(_tenant(request), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get("/{response_id}/input_items", response_class=Response)
    async def input_items(request: Request, response_id: str) -> Response:
        items = await (await stored(request, response_id)).items()
        return _json(await json_bytes(page(items, request.query_params)))

    @router.post("/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Json:
        await stored(request, response_id)
        raise InvalidRequest("only background responses can be cancelled, and there are none; close the connection")

    return router


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _tenant(request: Request) -> str:
    tenant: str = getattr(request.state, "tenant", DEFAULT_TENANT)
    return tenant


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"the response {response_id[:64]!r} was not found", field="response_id", code="response_not_found")
