"""`/tokenize` and `/detokenize`, as vLLM has them: what a prompt is made of, without any answer."""

from typing import Annotated, Any

from fastapi import APIRouter, Request

from common.errors import InvalidRequest
from gateway.generation import ServingLimits
from gateway.http.body import read_body
from gateway.http.chat_input import chat_input
from gateway.http.formats import Json
from gateway.http.limits import Bounded
from gateway.http.refused import refuse_unsupported
from gateway.http.schemas import Body, ChatBody, Messages
from gateway.http.services import HttpServices
from gateway.off_loop import off_loop
from gateway.prompts import chat_prompt
from gateway.serving import ServingModel
from gateway.tokens import detokenize, tokenize, with_special_tokens


class TokenizeBody(ChatBody):
    """POST /tokenize: a text, or a conversation with all that makes its prompt."""

    messages: Messages | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Bounded()]


def _body(schema: type[Body]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


#: Of the OpenAPI document.
_TOKENIZE = _body(TokenizeBody)
_DETOKENIZE = _body(DetokenizeBody)


def tokenize_router(services: HttpServices) -> APIRouter:
    """The two routes, over the given services."""
    router = APIRouter()
    model, options = services.model, services.options
    limits = services.dispatcher.limits

    @router.post("/tokenize", openapi_extra=_TOKENIZE)
    async def tokenize_(request: Request) -> Json:
        body = await read_body(
            request, TokenizeBody, max_bytes=options.max_body_bytes, max_seconds=options.body_timeout
        )
        model.check_name(body.model)
        ids = await _ids(body, model, limits())
        return {
            "count": len(ids),
            "max_model_len": limits().max_request_tokens,
            "tokens": ids,
            "token_strs": await _pieces(model, ids) if body.return_token_strs else None,
        }

    @router.post("/detokenize", openapi_extra=_DETOKENIZE)
    async def detokenize_(request: Request) -> Json:
        body = await read_body(
            request, DetokenizeBody, max_bytes=options.max_body_bytes, max_seconds=options.body_timeout
        )
        model.check_name(body.model)
        return {"prompt": await detokenize(model, body.tokens, limits(), field="tokens")}

    return router


async def _ids(body: TokenizeBody, model: ServingModel, limits: ServingLimits) -> list[int]:
    """A text gets the model's begin token unless it is not wanted, a conversation only if it is: templates have it."""
    if (body.messages is None) == (body.prompt is None):
        raise InvalidRequest("one of prompt and messages must be given", field="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return await tokenize(model, body.prompt, limits, add_special_tokens=special, field="prompt")
    refuse_unsupported(body.model_extra)
    prompt = await chat_prompt(model, chat_input(body, body.messages or []), limits)
    return with_special_tokens(model.tokenizer, prompt.ids) if body.add_special_tokens else prompt.ids


async def _pieces(model: ServingModel, ids: list[int]) -> list[str]:
    """Tokens as the vocabulary spells them, marks of spaces and bytes included."""
    return await off_loop(lambda: [model.tokenizer.piece(token_id) for token_id in ids], len(ids))
