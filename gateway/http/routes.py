"""The OpenAI routes: read, prepare, answer. Each handler is one line of each."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.http.body import BodyT, read_body
from gateway.http.call import Call
from gateway.http.chat_request import chat_call
from gateway.http.chunks import ChunkWriter
from gateway.http.completion_request import completion_call
from gateway.http.respond import GenerationResponse
from gateway.http.schemas import ChatCompletionBody, CompletionBody
from gateway.http.services import HttpServices


def _body_schema(schema: type[ChatCompletionBody] | type[CompletionBody]) -> dict[str, Any]:
    """The body for the OpenAPI document; handlers read it themselves, within limits."""
    json_schema = schema.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": json_schema}}}}


#: Of the OpenAPI document.
_CHAT_COMPLETIONS = _body_schema(ChatCompletionBody)
_COMPLETIONS = _body_schema(CompletionBody)


def openai_router(services: HttpServices) -> APIRouter:
    """Routes under /v1, over the given services."""
    router = APIRouter(prefix="/v1")
    model, dispatcher, options = services.model, services.dispatcher, services.options

    async def read(request: Request, schema: type[BodyT]) -> BodyT:
        return await read_body(request, schema, max_bytes=options.max_body_bytes, max_seconds=options.body_timeout)

    def respond(request: Request, call: Call) -> Response:
        writer = ChunkWriter(call.format_, call.mode)
        return GenerationResponse(services, call.prepared, writer, request.state.record, stream=call.mode.stream)

    @router.post("/chat/completions", openapi_extra=_CHAT_COMPLETIONS, response_class=Response)
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatCompletionBody)
        return respond(request, await chat_call(body, model, dispatcher.limits()))

    @router.post("/completions", openapi_extra=_COMPLETIONS, response_class=Response)
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionBody)
        return respond(request, await completion_call(body, model, dispatcher.limits()))

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_json(services, model.name)]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return _model_json(services, model.check_name(name))

    return router


def _model_json(services: HttpServices, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": services.model.created,
        "owned_by": "tandem",
        "max_model_len": services.dispatcher.limits().max_request_tokens,
    }
