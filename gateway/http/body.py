"""Reads a request body within limits and turns it into a schema object; complaints name the field."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from common.errors import Cancelled, InvalidRequest, PayloadTooLarge
from gateway.http.limits import MAX_BRACKETS
from gateway.http.schemas import TAG_PREFIX

BodyT = TypeVar("BodyT", bound=BaseModel)


async def read_body(request: Request, schema: type[BodyT], *, max_bytes: int, max_seconds: float) -> BodyT:
    """The body as `schema`.

    Args:
        max_bytes: longer bodies are refused before they are read to the end.
        max_seconds: time within which the body must be there.

    Raises InvalidRequest (not JSON, or not of the schema), PayloadTooLarge, Cancelled (the client left), or
    HTTPException 408 and 415.
    """
    _check_media_type(request)
    try:
        async with asyncio.timeout(max_seconds):
            raw = await _read_limited(request, max_bytes)
    except TimeoutError as error:
        raise HTTPException(408, f"The body did not arrive within {max_seconds:g} s") from error
    except ClientDisconnect as error:
        raise Cancelled("the client left before its body had arrived") from error
    if raw.count(b"{") + raw.count(b"[") > MAX_BRACKETS:
        raise InvalidRequest(f"the body has more than {MAX_BRACKETS} lists, objects and brackets in texts")
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise _complaint(error) from error


@cache
def openapi_body(schema: type[BaseModel]) -> dict[str, Any]:
    """The body for the OpenAPI document (`openapi_extra`): handlers read it themselves, within limits.

    Made once for all apps of a process; nobody may change it.
    """
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _check_media_type(request: Request) -> None:
    """A browser sends other sites' forms without asking, but not JSON: so JSON is required where a type is given."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, "Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise HTTPException(415, "Content-Encoding must be identity: bodies are read as they come")


async def _read_limited(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {max_bytes} bytes")


def _complaint(error: ValidationError) -> InvalidRequest:
    """The first of pydantic's complaints, without the value that caused it (it may be huge)."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = _field_name(first["loc"])
    if first["type"] == "json_invalid":
        return InvalidRequest(first["msg"], code="invalid_json")
    return InvalidRequest(f"{field}: {first['msg']}" if field else first["msg"], field=field)


def _field_name(location: Sequence[int | str]) -> str | None:
    """`messages[0].content` for ("messages", 0, "content", "|parts")."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith(TAG_PREFIX):
            name += f".{part}" if name else part
    return name or None
