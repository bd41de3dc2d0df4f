"""A server that speaks just enough OpenAI, over real HTTP, for tests of the load generator: scripted, no model."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

MODEL = "fake-model"


class FakeOpenAI:
    """Answers /v1/models, /metrics, and completions with `max_tokens` pieces; remembers each body.

    Args:
        fail_every: each so-manieth completion is answered 503; 0: none.
        metrics: text of /metrics; the marker {n} becomes the number of completions so far.
    """

    def __init__(self, fail_every: int = 0, metrics: str = "") -> None:
        self.bodies: list[dict[str, Any]] = []
        self._fail_every = fail_every
        self._metrics = metrics

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen on loopback; gives the URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path = line.split()[1].decode()
                headers = {}
                while (header := await reader.readline()) != b"\r\n":
                    name, _, value = header.partition(b":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
                await self._answer(path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            _whole(writer, 200, json.dumps({"data": [{"id": MODEL}]}))
        elif path == "/metrics":
            _whole(writer, 200, self._metrics.replace("{n}", str(len(self.bodies))))
        else:
            await self._completion(json.loads(body), writer)
        await writer.drain()

    async def _completion(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        if self._fail_every and len(self.bodies) % self._fail_every == 0:
            _whole(writer, 503, json.dumps({"error": {"message": "full", "code": "overloaded"}}))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in answer_events(body):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            # Let the other streams have their turn between two tokens.
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")


def answer_events(body: dict[str, Any]) -> list[bytes]:
    """The stream for a request: role delta (chat), one piece per token, finish, usage, [DONE]."""
    chat = "messages" in body
    pieces = [{"delta": {"content": " x"}} if chat else {"text": " x"} for _ in range(body["max_tokens"])]
    opening = [{"delta": {"role": "assistant", "content": ""}}] if chat else []
    finish = {"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"}
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, **choice}]} for choice in (*opening, *pieces, finish)]
    usage = {"prompt_tokens": len(body.get("prompt", "")) or 7, "completion_tokens": body["max_tokens"]}
    events.append({"choices": [], "usage": usage})
    return [b"data: %b\n\n" % json.dumps(event).encode() for event in events] + [b"data: [DONE]\n\n"]


def _whole(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = text.encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
