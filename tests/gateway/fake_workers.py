"""Programmable decode and prefill workers over real gRPC: scripted tokens, shortages, crashes, restarts on one port.

A FakeWorker talks the protocols and computes nothing. By default a decode worker answers choice c of a prompt with
tokens `token(c, 0), token(c, 1), ...`, a function of choice and index alone, so that a replay elsewhere continues with
the same ones.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from common.manifest import WIRE_VERSION_MAX, WIRE_VERSION_MIN
from common.pb.tandem.v1 import decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from common.pb.tandem.v1.generation_pb2 import FINISH_REASON_LENGTH, Candidate, RequestStats, TokenLogprobs

Context = grpc.aio.ServicerContext[Any, Any]

MODEL = "fake-model"


def token(choice: int, index: int) -> int:
    return 1000 * (choice + 1) + index


def manifest(model: str = MODEL) -> worker_pb2.Manifest:
    return worker_pb2.Manifest(
        wire_version_min=WIRE_VERSION_MIN,
        wire_version_max=WIRE_VERSION_MAX,
        model=model,
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        kv_dtype="float32",
        vocab_size=5000,
        max_model_len=4096,
    )


@dataclass
class Run:
    """One submitted attempt, as the worker sees it."""

    submit: decode_pb2.SubmitRequest
    send: Callable[[decode_pb2.DecodeMessage], None]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled_choices: set[int] = field(default_factory=set)
    #: Tokens of each choice so far, those of earlier attempts included.
    counts: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    #: Prompt tokens that it says were computed.
    computed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [len(choice.output_ids) for choice in self.submit.choices]
        self.computed_tokens = max(1, len(self.submit.prompt_ids) - 3)
        self.ended = {index for index, choice in enumerate(self.submit.choices) if choice.finished}

    @property
    def key(self) -> dict[str, Any]:
        return {"request_id": self.submit.request_id, "attempt": self.submit.attempt}

    @property
    def over(self) -> bool:
        return len(self.ended) == len(self.counts)

    def accept(self) -> None:
        self.send(decode_pb2.DecodeMessage(accepted=decode_pb2.Accepted(**self.key)))

    def reject(self, field_name: str, message: str) -> None:
        self.send(decode_pb2.DecodeMessage(rejected=decode_pb2.Rejected(field=field_name, message=message, **self.key)))

    def shortage(self, message: str = "full", retry_after: float = 7.0) -> None:
        shortage = decode_pb2.Shortage(message=message, retry_after_seconds=retry_after, **self.key)
        self.send(decode_pb2.DecodeMessage(shortage=shortage))

    def delta(self, choice: int, first_index: int, ids: list[int], *, last: bool = False) -> decode_pb2.Delta:
        wants_logprobs = self.submit.sampling.HasField("logprobs")
        return decode_pb2.Delta(
            choice=choice,
            first_index=first_index,
            token_ids=ids,
            logprobs=[TokenLogprobs(chosen=Candidate(token_id=i, logprob=-0.5)) for i in ids] if wants_logprobs else [],
            finish_reason=FINISH_REASON_LENGTH if last else None,
            computed_tokens=self.computed_tokens,
            **self.key,
        )

    def score(self, first: int = 1, end: int | None = None) -> None:
        """Log probabilities of the prompt tokens at positions [first, end), up to the last one."""
        ids = self.submit.prompt_ids[first:end]
        delta = decode_pb2.PromptLogprobsDelta(
            first_position=first,
            entries=[TokenLogprobs(chosen=Candidate(token_id=i, logprob=-0.25)) for i in ids],
            **self.key,
        )
        self.send(decode_pb2.DecodeMessage(step=decode_pb2.Step(prompt_logprobs=[delta])))

    def step(self, *deltas: decode_pb2.Delta, finished: decode_pb2.Finished | None = None) -> None:
        step = decode_pb2.Step(deltas=deltas, finished=[finished] if finished is not None else [])
        self.send(decode_pb2.DecodeMessage(step=step))

    def tokens(self, count: int = 1) -> None:
        """`count` more tokens of every choice that runs, the finish reason at max_tokens."""
        limit = self.submit.sampling.max_tokens
        deltas = []
        for choice, have in enumerate(self.counts):
            if choice in self.ended or choice in self.cancelled_choices:
                continue
            until = min(limit, have + count)
            ids = [token(choice, index) for index in range(have, until)]
            deltas.append(self.delta(choice, have, ids, last=until == limit))
            self.counts[choice] = until
            if until == limit:
                self.ended.add(choice)
        self.step(*deltas)

    def finish(self, outcome: decode_pb2.Outcome = decode_pb2.OUTCOME_OK, message: str = "") -> None:
        prompt = len(self.submit.prompt_ids)
        stats = RequestStats(
            prompt_tokens=prompt,
            output_tokens=sum(self.counts),
            computed_tokens=self.computed_tokens,
            transfer_bytes=4096,
            transfer_messages=2,
            transfer_seconds=0.5,
            transfer_exposed_seconds=0.1,
            decode_worker="fake",
        )
        self.step(finished=decode_pb2.Finished(outcome=outcome, message=message, stats=stats, **self.key))

    def all_tokens(self) -> None:
        """Everything at once."""
        self.accept()
        if self.submit.sampling.HasField("prompt_logprobs"):
            self.score()
        self.tokens(self.submit.sampling.max_tokens)
        self.finish()


async def answer_all(run: Run) -> None:
    """The default behaviour: a request is answered whole, at once."""
    run.all_tokens()


Behaviour = Callable[[Run], Any]


class FakeWorker:
    """One worker process, as far as a gateway can tell."""

    def __init__(
        self,
        role: str = "decode",
        worker_id: str = "decode-0",
        *,
        behave: Behaviour = answer_all,
        model: str = MODEL,
        max_request_tokens: int = 4096,
    ) -> None:
        """`behave` is a coroutine function that runs for each Submit."""
        self.role = role
        self.worker_id = worker_id
        self.behave = behave
        self.manifest = manifest(model)
        self.status = worker_pb2.WorkerStatus(
            worker_id=worker_id,
            role=worker_pb2.ROLE_DECODE if role == "decode" else worker_pb2.ROLE_PREFILL,
            pid=4242,
            state=worker_pb2.WORKER_STATE_READY,
            blocks=worker_pb2.BlockCounts(total=256, free=256, block_size=16),
            max_request_tokens=max_request_tokens,
        )
        self.port = 0
        self.starts = 0
        #: Every attempt that was ever submitted, over restarts.
        self.runs: list[Run] = []
        self.submitted: asyncio.Queue[Run] = asyncio.Queue()
        self.streams = 0
        #: Streams of gateways get no Hello before it is set.
        self.greets = asyncio.Event()
        self.greets.set()
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; on the same port as before after a crash, under a new incarnation."""
        self.starts += 1
        self.status.incarnation = f"{self.worker_id}-{self.starts}"
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(_WorkerServicer(self), server)
        decode_pb2_grpc.add_DecodeServicer_to_server(_DecodeServicer(self), server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.status.address = self.address
        await server.start()
        self._server = server

    async def crash(self) -> None:
        """All streams break at once, as when the process is killed."""
        assert self._server is not None
        server, self._server = self._server, None
        await server.stop(None)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        if self._server is not None:
            await self.crash()

    def update(self, **fields: Any) -> None:
        """Change the status; watchers hear at once."""
        for name, value in fields.items():
            if isinstance(value, list):
                del getattr(self.status, name)[:]
                getattr(self.status, name).extend(value)
            else:
                setattr(self.status, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """The next change of the status, or a second: real workers send one so often."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._changed.wait()

    def spawn(self, run: Run) -> None:
        self.runs.append(run)
        self.submitted.put_nowait(run)
        task = asyncio.ensure_future(self.behave(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def GetManifest(self, request: worker_pb2.GetManifestRequest, context: Context) -> worker_pb2.Manifest:
        return self._worker.manifest

    async def Watch(self, request: worker_pb2.WatchRequest, context: Context) -> AsyncIterator[worker_pb2.WorkerStatus]:
        while True:
            waiting = asyncio.ensure_future(self._worker.changed())
            status = worker_pb2.WorkerStatus()
            status.CopyFrom(self._worker.status)
            yield status
            await waiting


class _DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Submit(
        self, request_iterator: AsyncIterator[decode_pb2.GatewayMessage], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeMessage]:
        worker = self._worker
        outbox: asyncio.Queue[decode_pb2.DecodeMessage] = asyncio.Queue()
        first = await anext(aiter(request_iterator))
        assert first.hello.gateway_id
        worker.streams += 1
        await worker.greets.wait()
        hello = decode_pb2.DecodeHello(
            worker_id=worker.worker_id, incarnation=worker.status.incarnation, manifest=worker.manifest
        )
        yield decode_pb2.DecodeMessage(hello=hello)
        reader = asyncio.ensure_future(self._read(request_iterator, outbox))
        try:
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()

    async def _read(
        self,
        messages: AsyncIterator[decode_pb2.GatewayMessage],
        outbox: asyncio.Queue[decode_pb2.DecodeMessage],
    ) -> None:
        runs: dict[tuple[str, int], Run] = {}
        async for message in messages:
            if message.HasField("submit"):
                run = Run(message.submit, outbox.put_nowait)
                runs[message.submit.request_id, message.submit.attempt] = run
                self._worker.spawn(run)
            elif message.HasField("cancel"):
                run = runs[message.cancel.request_id, message.cancel.attempt]
                if message.cancel.HasField("choice"):
                    run.cancelled_choices.add(message.cancel.choice)
                    run.ended.add(message.cancel.choice)
                else:
                    run.cancelled.set()
