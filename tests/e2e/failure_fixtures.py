"""Clients that can be read bit by bit and broken off at any point, and what undisturbed answers look like."""

import json
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import grpc
import httpx
from redis import Redis

from common.pb.tandem.v1 import generation_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from common.redis_keys import Keys
from common.registry import WorkerRecord
from deploy.valkey import valkey_url
from tests.e2e.cluster import LOOPBACK, PATIENCE, Cluster, eventually
from tests.e2e.loopback import PLAIN
from tests.factories.oracle import TinyModel

MODEL = "test-model"
#: Every worker of these tests: small steps, so that each phase is seen and left soon; ample memory.
WORKER_OPTIONS = {"--kv-memory": "96MiB", "--max-batch-tokens": "64"}


def make_prompt(seed: int, length: int) -> list[int]:
    """Ordinary tokens; another seed shares no prefix with it."""
    return random.Random(seed).choices(range(5, 300), k=length)


class Prompts:
    """Prompts that no worker has seen."""

    def __init__(self) -> None:
        self._next = 1_000_000

    def fresh(self, length: int) -> list[int]:
        self._next += 1
        return make_prompt(self._next, length)


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: int = 0


@dataclass
class Answer:
    """All that came of a request."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stats: generation_pb2.RequestStats | None = None

    @property
    def token_ids(self) -> list[list[int]]:
        return [self.choices[index].token_ids for index in sorted(self.choices)]

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        if response.WhichOneof("event") == "summary":
            summary = response.summary
            self.prompt_tokens, self.completion_tokens = summary.prompt_tokens, summary.completion_tokens
            self.stats = summary.stats
            return
        delta = response.delta
        choice = self.choices.setdefault(delta.choice, Choice())
        assert not choice.finish_reason, f"choice {delta.choice} goes on after its end"
        choice.token_ids += delta.token_ids
        choice.text += delta.text
        choice.logprobs += [entry.chosen.logprob for entry in delta.logprobs]
        choice.finish_reason = delta.finish_reason


class GrpcStream:
    """One `Generate` call, read as far as the test wants. Starts at once; a context manager."""

    def __init__(
        self, cluster: Cluster, prompt: Sequence[int], max_tokens: int, *, deadline: float | None = None, **options: Any
    ) -> None:
        """`options`: of GenerationOptions; greedy unless they say otherwise, and end tokens end nothing."""
        settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **options}
        request = inference_pb2.GenerateRequest(
            model=MODEL,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            options=inference_pb2.GenerationOptions(**settings),
        )
        self.answer = Answer()
        self._channel = grpc.insecure_channel(cluster.grpc_target)
        stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._call = stub.Generate(request, timeout=PATIENCE if deadline is None else deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()
        self._channel.close()

    def cancel(self) -> None:
        self._call.cancel()

    @property
    def is_over(self) -> bool:
        """It has ended, by itself or at its deadline, whatever was read of it."""
        return not self._call.is_active()

    def read(self, num_tokens: int) -> Answer:
        """Until so many tokens of all choices are there, at least. Raises grpc.RpcError as the call does."""
        while self.answer.num_tokens < num_tokens and (response := next(self._call, None)) is not None:
            self.answer.add(response)
        return self.answer

    def finish(self) -> Answer:
        for response in self._call:
            self.answer.add(response)
        assert self.answer.stats is not None, "the stream ended without a summary"
        return self.answer

    def code(self) -> grpc.StatusCode:
        """The status with which the call ends, having read what still comes."""
        with suppress(grpc.RpcError):
            self.finish()
        code: grpc.StatusCode = self._call.code()
        return code


def ask(cluster: Cluster, prompt: Sequence[int], max_tokens: int, **options: Any) -> Answer:
    """An undisturbed request."""
    with GrpcStream(cluster, prompt, max_tokens, **options) as stream:
        return stream.finish()


def completion_body(prompt: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    shared = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**shared, **fields}


class RawHttp:
    """A POST on a socket of its own, so that the client can be gone at any moment."""

    def __init__(self, cluster: Cluster, body: dict[str, Any], path: str = "/v1/completions") -> None:
        content = json.dumps(body).encode()
        port = int(cluster.url.rsplit(":", 1)[1])
        self._socket = socket.create_connection((LOOPBACK, port), timeout=PATIENCE)
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self.received = b""

    def read_until(self, marker: bytes, count: int = 1) -> None:
        while self.received.count(marker) < count:
            piece = self._socket.recv(65536)
            assert piece, f"the server closed the connection after {self.received!r}"
            self.received += piece

    def hang_up(self) -> None:
        self._socket.close()


def sse_events(url: str, body: dict[str, Any]) -> Iterator[Any]:
    """JSON of each event as it comes; "[DONE]" as text."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE, **PLAIN) as answer:
        assert answer.status_code == httpx.codes.OK, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


@dataclass
class Judge:
    """Sends normal requests and knows what is right."""

    cluster: Cluster
    model: TinyModel
    prompts: Prompts = field(default_factory=Prompts)

    def normal_request(self, length: int = 100, max_tokens: int = 8) -> str:
        """A prompt nobody knows gets the right tokens; returns who prefilled it."""
        prompt = self.prompts.fresh(length)
        answer = ask(self.cluster, prompt, max_tokens)
        expected = self.model.oracle.greedy_cached(prompt, max_tokens)
        assert answer.stats is not None
        assert answer.token_ids == [expected], f"{answer.token_ids} instead of {expected}; {answer.stats}"
        assert (answer.prompt_tokens, answer.completion_tokens) == (length, max_tokens)
        return str(answer.stats.prefill_worker)

    def uses(self, *workers: str) -> None:
        """Until one of `workers` prefills: the gateway learns of changes a moment later than the test."""
        eventually(lambda: self.normal_request() in workers, what=f"a prefill on {' or '.join(workers)}")

    def recovered(self) -> None:
        """Everything is given back, and the next request is served as if nothing had been."""
        self.cluster.wait_idle()
        self.normal_request()
        self.cluster.wait_idle()


class PhaseMissed(Exception):
    """A request went past the phase in which it was to be caught."""


def seize(open_: Callable[[], Any], in_phase: Callable[[], bool], passed: Callable[[], bool], tries: int = 10) -> Any:
    """Open requests until one is seen in its phase; returns it. `passed` tells that it went by.

    A busy machine may let a phase go by unseen, and the router may rightly take another way.
    """
    for _ in range(tries):
        request = open_()
        if eventually(lambda: "caught" if in_phase() else "missed" if passed() else "") == "caught":
            return request
        (request.cancel if hasattr(request, "cancel") else request.hang_up)()
    raise PhaseMissed


@contextmanager
def timed(what: str, times: dict[str, float]) -> Iterator[None]:
    """Note how long the block took, for people: no test depends on it."""
    begun = time.monotonic()
    yield
    times[what] = time.monotonic() - begun
    print(f"{what}: {times[what] * 1000:.0f} ms")


def announce(cluster: Cluster, name: str) -> None:
    """Put a worker that runs without a registry into it, for as long as the test can last."""
    status = cluster.status(name)
    role: Literal["prefill", "decode"] = "decode" if status.role == worker_pb2.ROLE_DECODE else "prefill"
    record = WorkerRecord(name, role, status.address, status.incarnation, MODEL, status.pid)
    keys = Keys(MODEL)
    with Redis.from_url(valkey_url(cluster.scratch)) as redis:
        redis.hset(keys.workers, name, json.dumps(asdict(record)))
        redis.set(keys.heartbeat(name), status.incarnation, ex=600)


def registered(cluster: Cluster) -> set[str]:
    """Worker ids with a record and a heartbeat in the registry."""
    keys = Keys(MODEL)
    with Redis.from_url(valkey_url(cluster.scratch), decode_responses=True) as redis:
        names: list[str] = list(redis.hkeys(keys.workers))
        return {name for name in names if redis.exists(keys.heartbeat(name))}
