"""The options of `tandem bench serve`, and the levels of load that they ask for."""

import math
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from deploy.bench.run import Level
from deploy.bench.workload import Shape, read_trace, uniform

#: Requests of a level by default: enough for a median, for each stream that runs at once.
REQUESTS_PER_STREAM = 4
REQUESTS_OF_A_RATE = 50


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of `tandem bench serve`, by their names."""

    url: str
    model: str | None
    api_key: str
    endpoint: str
    prompt: str
    concurrency: tuple[int, ...]
    rate: float | None
    trace: Path | None
    speed_up: float
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int
    num_requests: int | None
    duration: float | None
    warm_up: int
    ignore_eos: bool
    temperature: float
    token_range: tuple[int, int]
    seed: int


def levels(options: ServeOptions) -> list[Level]:
    """The levels of load that the options ask for.

    Raises:
        ConfigError: options that contradict each other, or a trace that cannot be read.
    """
    duration = options.duration or math.inf
    if options.trace and options.rate:
        raise ConfigError("a trace has its own times; give --trace or --rate", field="--rate")
    if options.token_range[0] >= options.token_range[1] or options.token_range[0] < 0:
        raise ConfigError("LOW must be below HIGH, and not below 0", field="--token-range")
    if options.endpoint == "chat" and options.prompt == "ids":
        raise ConfigError("the chat API takes no token ids: add --prompt text", field="--endpoint")
    if options.trace:
        return [Level(read_trace(options.trace, options.num_requests), speed_up=options.speed_up, duration=duration)]
    if options.rate:
        wanted = math.ceil(options.rate * options.duration) if options.duration else REQUESTS_OF_A_RATE
        return [Level(_shapes(options, wanted), rate=options.rate, duration=duration)]
    return [_closed_level(options, streams, duration) for streams in options.concurrency]


def _closed_level(options: ServeOptions, streams: int, duration: float) -> Level:
    # With a duration and no number, the time alone decides: more requests than any server answers.
    wanted = 10**6 if options.duration else REQUESTS_PER_STREAM * streams
    return Level(_shapes(options, wanted), concurrency=streams, duration=duration)


def _shapes(options: ServeOptions, wanted: int) -> list[Shape]:
    return uniform(options.num_requests or wanted, options.prompt_tokens, options.output_tokens)
