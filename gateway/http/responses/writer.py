"""Writes a response: a stream of semantic events or one object, stored before its client hears of its end."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequest, RateLimited
from common.sampling import FinishReason
from gateway.answer import Answer
from gateway.completion import ChoiceDelta, Usage
from gateway.http.errors import error_body
from gateway.http.events import event_pieces
from gateway.http.formats import Json
from gateway.http.json_body import json_paced
from gateway.http.responses.output import Output
from gateway.http.responses.store import ResponseStore, StoredResponse


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where a response goes when it has ended."""

    store: ResponseStore
    tenant: str
    #: Items that the response is made from, those of earlier responses included.
    input: Sequence[Json]
    #: The client wants it kept, and something is kept here.
    wanted: bool


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What of a response object is known before there is an answer."""

    id: str
    #: What the client asked for, as it is in force.
    echo: Mapping[str, Any]
    created_at: int = field(default_factory=lambda: int(time.time()))

    def json(self, status: str, output: Sequence[Json], *, store: bool, **more: object) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **self.echo,
            "output": list(output),
            "store": store,
            "usage": None,
            **more,
        }


class ResponseWriter:
    """`AnswerWriter` of the Responses API, for the one choice that a response has."""

    def __init__(self, head: ResponseHead, output: Output, keeping: Keeping) -> None:
        self._head = head
        self._output = output
        self._keeping = keeping
        self._finish: FinishReason | None = None
        self._sequence = 0

    def begin(self) -> Iterator[bytes]:
        response = self._head.json("in_progress", [], store=self._keeping.wanted)
        return self._events(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def delta(self, index: int, delta: ChoiceDelta, answer: Answer) -> Iterator[bytes]:
        return self._events(self._read(delta))

    async def end(self, answer: Answer) -> Iterator[bytes]:
        events = self._output.finish(self._status)
        response = await self._ended(answer.usage)
        return self._events([*events, {"type": f"response.{response['status']}", "response": response}])

    async def failure(self, error: Exception) -> Iterator[bytes]:
        told = error_body(error)["error"]
        self._output.abandon()
        failed = self._head.json("failed", self._output.json, store=self._keeping.wanted, error=_response_error(error))
        response = await self._stored(failed)
        return self._events(
            [
                {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]},
                {"type": "response.failed", "response": response},
            ]
        )

    async def whole(self, answer: Answer) -> Sequence[bytes]:
        async for _, delta in answer:
            self._read(delta)
        self._output.finish(self._status)
        return await json_paced(await self._ended(answer.usage))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _read(self, delta: ChoiceDelta) -> list[Json]:
        self._finish = delta.finish_reason
        return self._output.read(delta)

    async def _ended(self, usage: Usage) -> Json:
        details = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        response = self._head.json(
            self._status,
            self._output.json,
            store=self._keeping.wanted,
            incomplete_details=details,
            usage=usage_json(usage, self._output.reasoning_tokens),
        )
        return await self._stored(response)

    async def _stored(self, response: Json) -> Json:
        """The response, whose `store` says whether it is kept."""
        keeping = self._keeping
        if not keeping.wanted:
            return response
        stored = await StoredResponse.of(response, keeping.input)
        kept = stored is not None and await keeping.store.put(keeping.tenant, self._head.id, stored)
        return response | {"store": kept}

    def _events(self, bodies: Sequence[Json]) -> Iterator[bytes]:
        return (piece for body in bodies for piece in self._event(body))

    def _event(self, body: Json) -> Iterator[bytes]:
        numbered = body | {"sequence_number": self._sequence}
        self._sequence += 1
        return event_pieces(numbered, name=body["type"])


def usage_json(usage: Usage, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _response_error(error: Exception) -> Json:
    """The few codes that a response object may hold."""
    code = "server_error"
    if isinstance(error, RateLimited):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    return {"code": code, "message": error_body(error)["error"]["message"]}
