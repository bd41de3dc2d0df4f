"""Answers one generation request over HTTP, in one piece or as an event stream, and lets go when the client leaves.

Everything that can go wrong before the workers have accepted the request is an ordinary error response, also for
streams; what goes wrong later is the stream's last event.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import Cancelled, TandemError
from gateway.accounting import RequestRecord
from gateway.answer import Answer, open_answer
from gateway.http.errors import CLIENT_CLOSED_REQUEST, http_status
from gateway.http.events import AnswerWriter
from gateway.http.services import HttpServices
from gateway.validation import PreparedRequest

LOG = logging.getLogger("tandem.gateway.http")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would turn the stream into one piece.
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """An ASGI response that owns its generations from acceptance to the last byte."""

    def __init__(
        self,
        services: HttpServices,
        prepared: Sequence[PreparedRequest],
        writer: AnswerWriter,
        record: RequestRecord,
        *,
        stream: bool,
    ) -> None:
        super().__init__()
        self._services = services
        self._prepared = prepared
        self._writer = writer
        self._record = record
        self._wants_stream = stream
        #: The status line is out.
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = asyncio.Event()

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                complete.set()
            await send(message)

        try:
            await _while_connected(receive, complete, self._answer(scope, receive, noting_send))
        except Cancelled:
            self._record.finish(str(CLIENT_CLOSED_REQUEST))
            if not self._begun:
                raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        answer = await open_answer(services.dispatcher, services.model.tokenizer, self._prepared, self._record)
        try:
            if self._wants_stream:
                await self._stream(answer, send)
            else:
                await self._whole(await self._writer.whole(answer), send)
        finally:
            await answer.aclose()

    async def _whole(self, pieces: Sequence[bytes], send: Send) -> None:
        length = str(sum(map(len, pieces))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._write(send, iter(pieces), last=True)
        except TimeoutError:
            self._cut()

    async def _stream(self, answer: Answer, send: Send) -> None:
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            await self._send_to_end(answer, send)
        except TimeoutError:
            self._cut()

    async def _send_to_end(self, answer: Answer, send: Send) -> None:
        """The answer's events, or those so far and what went wrong. Raises TimeoutError as `_write`."""
        try:
            await self._send_events(answer, send)
        except TimeoutError:
            raise
        except Exception as error:  # the status line is out: the client hears of it in the stream
            if not isinstance(error, TandemError):
                LOG.exception("request %s failed in mid-stream", self._record.request_id)
            self._record.finish(str(http_status(error)))
            await self._write(send, await self._writer.failure(error), last=True)

    async def _send_events(self, answer: Answer, send: Send) -> None:
        await self._write(send, self._writer.begin())
        async with aclosing(answer.__aiter__()) as deltas:
            async for index, delta in deltas:
                await self._write(send, self._writer.delta(index, delta, answer))
        await self._write(send, await self._writer.end(answer), last=True)

    async def _write(self, send: Send, pieces: Iterator[bytes], *, last: bool = False) -> None:
        """Waits while the client's socket is full, so that nothing piles up here. Raises TimeoutError.

        Args:
            last: nothing follows these pieces, which are one at least. The last one says so itself: a client that has
                it may leave.
        """
        piece = next(pieces, None)
        while piece is not None:
            following = next(pieces, None)
            more = not last or following is not None
            async with asyncio.timeout(self._services.options.write_timeout):
                await send({"type": "http.response.body", "body": piece, "more_body": more})
            piece = following
            if piece is not None:
                # A socket that takes all at once would keep the loop from everything else.
                await asyncio.sleep(0)

    def _cut(self) -> None:
        LOG.warning("request %s: client read nothing for too long; answer cut", self._record.request_id)
        self._record.finish(str(CLIENT_CLOSED_REQUEST))


async def _while_connected(receive: Receive, complete: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; cancels it, waits for it and raises Cancelled as soon as the client is gone.

    Servers report the end of a complete response as a disconnect too: with `complete` set, `work` may end in peace.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not complete.is_set():
            raise Cancelled("the client left")
        await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
