"""Runs the levels of a benchmark one after the other, each with its own prompts, and gathers their figures."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.bench.client import OpenAIClient, Outcome
from deploy.bench.load import closed_loop, open_loop, poisson_times, trace_times
from deploy.bench.prompts import Prompts
from deploy.bench.report import summarize
from deploy.bench.server_figures import read_counters, server_figures
from deploy.bench.workload import Shape


@dataclass(frozen=True, slots=True)
class Level:
    """One load to measure. Exactly one of `concurrency`, `rate` and `speed_up` is set."""

    shapes: Sequence[Shape]
    #: Requests at once.
    concurrency: int | None = None
    #: Poisson arrivals a second.
    rate: float | None = None
    #: The shapes' own times, so much faster.
    speed_up: float | None = None
    #: Seconds after which no request is begun.
    duration: float = math.inf

    def __str__(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} at once"
        return f"{self.rate:g} a second" if self.rate else f"trace x{self.speed_up:g}"


class Benchmark:
    """Drives one server.

    Args:
        client: to that server.
        prompts_as_ids: send token ids; else words.
        seed: of prompts and arrivals; each level takes its own from it.
        shared_prefix: tokens that all prompts of a level have in common.
        token_range: ids to draw from.
    """

    def __init__(
        self, client: OpenAIClient, *, prompts_as_ids: bool, seed: int, shared_prefix: int, token_range: tuple[int, int]
    ) -> None:
        self._client = client
        self._prompts_as_ids = prompts_as_ids
        self._seed = seed
        self._shared_prefix = shared_prefix
        self._token_range = token_range

    async def warm_up(self, shape: Shape, count: int) -> list[Outcome]:
        """`count` requests at once, not to be counted."""
        prompts = self._prompts(-1)
        return await asyncio.gather(*(self._send(prompts, index, shape) for index in range(count)))

    async def measure(self, number: int, level: Level) -> dict[str, Any]:
        """The figures of `level`, which is the benchmark's level `number`."""
        before = await read_counters(self._client.http)
        outcomes = await self._load(number, level)
        after = await read_counters(self._client.http)
        return {"load": str(level), **summarize(outcomes), "server": server_figures(before, after)}

    async def _load(self, number: int, level: Level) -> list[Outcome]:
        prompts = self._prompts(number)
        clock = self._client.clock

        async def send(index: int, shape: Shape) -> Outcome:
            return await self._send(prompts, index, shape)

        if level.concurrency:
            return await closed_loop(send, level.shapes, level.concurrency, clock() + level.duration, clock)
        if level.rate:
            times = poisson_times(len(level.shapes), level.rate, self._seed)
        else:
            times = trace_times(level.shapes, level.speed_up or 1.0)
        begun = [time for time in times if time < level.duration]
        return await open_loop(send, level.shapes[: len(begun)], begun, clock)

    def _prompts(self, number: int) -> Prompts:
        return Prompts(f"{self._seed} level {number}", self._shared_prefix, self._token_range)

    async def _send(self, prompts: Prompts, index: int, shape: Shape) -> Outcome:
        prompt = prompts.token_ids(index, shape) if self._prompts_as_ids else prompts.text(index, shape)
        return await self._client.send(prompt, shape.output_tokens)
