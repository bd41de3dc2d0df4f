"""The long-lived stream to one decode worker: many attempts on it, each told what concerns it.

Reading never waits for anyone: messages are handed to `Attempt` objects by plain calls.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from common.pb.tandem.v1 import decode_pb2 as pb
from common.pb.tandem.v1 import decode_pb2_grpc
from common.rpc.channel import open_channel
from gateway.tasks import end, spawn

_log = logging.getLogger(__name__)

_HELLO_SECONDS = 5.0

Answer = pb.Accepted | pb.Rejected | pb.Shortage


@dataclass(frozen=True, slots=True)
class Broken:
    """The attempt failed with its worker or its stream; another worker may do better."""

    reason: str


class Unreachable(Exception):
    """No stream to the decode worker could be opened. Stays inside the dispatcher."""


class Attempt:
    """One Submit of one request on one worker."""

    def __init__(
        self,
        request_id: str,
        number: int,
        on_delta: Callable[[pb.Delta], bool],
        on_prompt_logprobs: Callable[[pb.PromptLogprobsDelta], bool],
    ) -> None:
        """Both callbacks return False if what they are given does not continue what came before."""
        self.request_id = request_id
        self.number = number
        loop = asyncio.get_running_loop()
        #: The worker's one answer to Submit.
        self.answer: asyncio.Future[Answer | Broken] = loop.create_future()
        #: The one end of an accepted attempt.
        self.ended: asyncio.Future[pb.Finished | Broken] = loop.create_future()
        self._on_delta = on_delta
        self._on_prompt_logprobs = on_prompt_logprobs

    def take_answer(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def take_delta(self, delta: pb.Delta) -> None:
        if not self.ended.done() and not self._on_delta(delta):
            self._protocol_error(f"choice {delta.choice} goes on at {delta.first_index}, which leaves a gap")

    def take_prompt_logprobs(self, delta: pb.PromptLogprobsDelta) -> None:
        if not self.ended.done() and not self._on_prompt_logprobs(delta):
            count = len(delta.entries)
            self._protocol_error(f"{count} prompt log probabilities from position {delta.first_position} do not fit")

    def _protocol_error(self, message: str) -> None:
        _log.error("decode worker broke the protocol", extra={"request_id": self.request_id, "error": message})
        self.break_off(message)

    def take_end(self, finished: pb.Finished) -> None:
        self.take_answer(pb.Accepted(request_id=self.request_id, attempt=self.number))
        if not self.ended.done():
            self.ended.set_result(finished)

    def break_off(self, reason: str) -> None:
        """Nothing more will come of it."""
        for future in (self.answer, self.ended):
            if not future.done():
                future.set_result(Broken(reason))


class DecodeConnection:
    """One stream. Once broken it stays so; make a new one."""

    def __init__(self, address: str, gateway_id: str, on_broken: Callable[["DecodeConnection"], None]) -> None:
        self.address = address
        self.worker_id = ""
        self.incarnation = ""
        self.broken = False
        self._gateway_id = gateway_id
        self._on_broken = on_broken
        self._attempts: dict[tuple[str, int], Attempt] = {}
        #: None: the stream is over.
        self._outbox: asyncio.Queue[pb.GatewayMessage | None] = asyncio.Queue()
        self._channel = open_channel(address)
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect and exchange Hello. Raises Unreachable, after which only `close` may be called."""
        self._outbox.put_nowait(pb.GatewayMessage(hello=pb.GatewayHello(gateway_id=self._gateway_id)))
        messages = aiter(decode_pb2_grpc.DecodeStub(self._channel).Submit(self._messages()))
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                first = await anext(messages, None)
        except grpc.aio.AioRpcError as error:
            raise Unreachable(f"{self.address}: {_words(error)}") from error
        except TimeoutError:
            raise Unreachable(f"{self.address}: no Hello within {_HELLO_SECONDS:.0f} s") from None
        if first is None or first.WhichOneof("message") != "hello":
            raise Unreachable(f"{self.address}: the stream began with {first!r} instead of Hello")
        self.worker_id, self.incarnation = first.hello.worker_id, first.hello.incarnation
        self._reader = spawn(self._read(messages), f"decode stream {self.address}")

    async def close(self) -> None:
        """End the stream; the worker then cancels what runs on it. Idempotent."""
        if self._reader is not None:
            await end([self._reader])
        self._break("the gateway closed the stream")
        await self._channel.close(None)

    def submit(self, attempt: Attempt, message: pb.SubmitRequest) -> None:
        """Send an attempt; its futures tell the rest. Never blocks."""
        if self.broken:
            attempt.break_off(f"no stream to {self.address}")
            return
        self._attempts[attempt.request_id, attempt.number] = attempt
        self._outbox.put_nowait(pb.GatewayMessage(submit=message))

    def cancel(self, attempt: Attempt, choice: int | None = None) -> None:
        """Cancel the attempt, or one choice of it. Never blocks; harmless if it has ended."""
        key = (attempt.request_id, attempt.number)
        if key not in self._attempts:
            return
        if choice is None:
            # Nobody wants what it still sends.
            del self._attempts[key]
        message = pb.CancelRequest(request_id=attempt.request_id, attempt=attempt.number, choice=choice)
        self._outbox.put_nowait(pb.GatewayMessage(cancel=message))

    async def _messages(self) -> AsyncIterator[pb.GatewayMessage]:
        """What to send. Ends with the stream: gRPC lets a generator wait for ever that belongs to a refused call."""
        while (message := await self._outbox.get()) is not None:
            yield message

    async def _read(self, messages: AsyncIterator[pb.DecodeMessage]) -> None:
        reason = "the worker ended the stream"
        try:
            async for message in messages:
                self._handle(message)
        except grpc.aio.AioRpcError as error:
            reason = _words(error)
        finally:
            self._break(reason)

    def _break(self, reason: str) -> None:
        if self.broken:
            return
        self.broken = True
        self._outbox.put_nowait(None)
        attempts = list(self._attempts.values())
        self._attempts.clear()
        for attempt in attempts:
            attempt.break_off(f"decode worker {self.worker_id} is gone: {reason}")
        self._on_broken(self)

    def _handle(self, message: pb.DecodeMessage) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._handle_step(message.step)
            case "accepted":
                self._answer(message.accepted)
            case "rejected":
                self._answer(message.rejected, final=True)
            case "shortage":
                self._answer(message.shortage, final=True)
            case kind:
                _log.warning("ignored a message", extra={"kind": kind, "worker": self.worker_id})

    def _answer(self, answer: Answer, final: bool = False) -> None:
        key = (answer.request_id, answer.attempt)
        # A stale attempt (cancelled meanwhile) is nobody's any more.
        if (attempt := self._attempts.get(key)) is not None:
            attempt.take_answer(answer)
            if final:
                del self._attempts[key]

    def _handle_step(self, step: pb.Step) -> None:
        for scores in step.prompt_logprobs:
            if (attempt := self._attempts.get((scores.request_id, scores.attempt))) is not None:
                attempt.take_prompt_logprobs(scores)
        for delta in step.deltas:
            if (attempt := self._attempts.get((delta.request_id, delta.attempt))) is not None:
                attempt.take_delta(delta)
        for finished in step.finished:
            if (attempt := self._attempts.pop((finished.request_id, finished.attempt), None)) is not None:
                attempt.take_end(finished)


class DecodeConnections:
    """One connection for each decode worker address, opened when first needed and after each loss."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._open: dict[str, DecodeConnection] = {}
        self._opening: dict[str, asyncio.Task[DecodeConnection]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, address: str) -> DecodeConnection:
        """An open connection. Raises Unreachable. Callers that come together share one attempt to connect."""
        if (connection := self._open.get(address)) is not None:
            return connection
        opening = self._opening.get(address)
        if opening is None:
            opening = self._opening[address] = asyncio.create_task(self._connect(address), name=f"connect {address}")
            opening.add_done_callback(lambda task: self._opened(address, task))
        # Shielded: one caller's cancellation must not fail the others.
        return await asyncio.shield(opening)

    async def _connect(self, address: str) -> DecodeConnection:
        connection = DecodeConnection(address, self._gateway_id, self._lost)
        try:
            await connection.open()
            if connection.broken:
                raise Unreachable(f"{address} broke the stream at once")
        except BaseException:
            await connection.close()
            raise
        self._open[address] = connection
        return connection

    def _opened(self, address: str, task: asyncio.Task[DecodeConnection]) -> None:
        del self._opening[address]
        if not task.cancelled():
            # Retrieved here in case that every caller was cancelled; callers get it from the task.
            task.exception()

    def _lost(self, connection: DecodeConnection) -> None:
        if self._open.get(connection.address) is connection:
            del self._open[connection.address]
            closing = spawn(connection.close(), f"close {connection.address}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for opening in list(self._opening.values()):
            opening.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        open_now = list(self._open.values())
        self._open.clear()
        for connection in open_now:
            await connection.close()
        await asyncio.gather(*self._closing)


def _words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
