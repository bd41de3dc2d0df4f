"""Times and counts of one request: a scripted stream moves the clock, so every figure is exact."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deploy.bench.client import OpenAIClient, Outcome
from deploy.bench.report import distribution, percentile, summarize
from deploy.sse import EventParser


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Script(httpx.AsyncByteStream):
    """Bytes that each come after a delay, on the given clock."""

    def __init__(self, clock: Clock, steps: list[tuple[float, bytes]]) -> None:
        self._clock = clock
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay, chunk in self._steps:
            self._clock.now += delay
            yield chunk


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
DONE = b"data: [DONE]\n\n"


async def send(steps: list[tuple[float, bytes]], status: int = 200, endpoint: str = "/v1/completions") -> Outcome:
    clock = Clock()
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Script(clock, steps)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        return await OpenAIClient(http, endpoint, {"model": "m"}, clock).send([1, 2, 3], 4)


async def test_times_are_those_of_pieces_with_text() -> None:
    first = b": a comment\n\n" + piece("")  # no text yet: not the first token
    outcome = await send(
        [(0.5, first), (0.5, piece(" a")), (0.25, piece(" b")), (0.75, piece(" c d") + USAGE), (1, DONE)]
    )
    assert outcome.error == ""
    assert (outcome.sent_at, outcome.piece_times, outcome.ended_at) == (100, [101, 101.25, 102], 103)
    assert (outcome.prompt_tokens, outcome.output_tokens) == (3, 4)
    figures = summarize([outcome])
    assert figures["ttft_ms"]["p50"] == 1000
    assert (figures["itl_ms"]["mean"], figures["itl_ms"]["p50"]) == (500, 500)
    # From the first piece to the last one second, for the three tokens after the first.
    assert figures["tpot_ms"]["p99"] == 333.333
    assert figures["e2e_ms"]["p95"] == 3000
    assert figures["output_tokens_per_s"] == pytest.approx(4 / 3, abs=1e-3)


async def test_events_cut_anywhere_are_put_together() -> None:
    whole = piece(" ä") + piece(" b").replace(b"\n", b"\r\n") + USAGE + DONE
    outcome = await send([(0.1, whole[i : i + 1]) for i in range(len(whole))])
    assert (outcome.error, len(outcome.piece_times), outcome.output_tokens) == ("", 2, 4)


@pytest.mark.parametrize("cut", range(1, 24))
def test_the_parser_gives_equal_events_wherever_the_bytes_are_cut(cut: int) -> None:
    data = b'data: {"a": 1}\r\n\r\ndata: [DONE]\r\n\r\n'
    parser = EventParser()
    events: list[Any] = parser.feed(data[:cut]) + parser.feed(data[cut:])
    assert (events, parser.done) == ([{"a": 1}], True)


async def test_without_usage_pieces_are_counted() -> None:
    outcome = await send([(1, piece(" a")), (1, piece(" b")), (0, DONE)])
    assert outcome.output_tokens == 2


@pytest.mark.parametrize(
    ("steps", "status", "error"),
    [
        ([(0, json.dumps({"error": {"message": "no", "code": "overloaded"}}).encode())], 503, "503 overloaded"),
        ([(0, b"<html>")], 502, "502"),
        ([(0, piece(" a"))], 200, "the stream ended without [DONE]"),
        ([(0, USAGE), (0, DONE)], 200, "no output"),
        ([(0, piece(" a")), (0, event({"error": {"message": "gone", "code": "no_worker"}}))], 200, "no_worker"),
        ([(0, b"data: nonsense\n\n")], 200, "JSONDecodeError"),
    ],
)
async def test_failures_are_told_and_not_counted(steps: list[tuple[float, bytes]], status: int, error: str) -> None:
    outcome = await send(steps, status)
    assert outcome.error == error
    figures = summarize([outcome])
    assert (figures["requests"], figures["completed"], figures["errors"]) == (1, 0, {error: 1})
    assert figures["ttft_ms"] is None


async def test_a_server_that_cannot_be_reached_is_an_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://server") as http:
        outcome = await OpenAIClient(http, "/v1/completions", {}).send("x", 1)
    assert outcome.error == "ConnectError"


def test_percentiles_lie_between_values_in_proportion() -> None:
    assert [percentile([1, 2, 3, 5], percent) for percent in (0, 50, 75, 100)] == [1, 2.5, 3.5, 5]
    assert percentile([7], 99) == 7
    assert distribution([]) is None
    assert distribution([0.002, 0.001]) == {"mean": 1.5, "p50": 1.5, "p95": 1.95, "p99": 1.99}
