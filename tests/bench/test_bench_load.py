"""Workloads, prompts, arrival times, and whole runs of `tandem bench serve` against a fake server."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from common.errors import ConfigError
from deploy.bench.client import Outcome
from deploy.bench.command import command
from deploy.bench.load import closed_loop, open_loop, poisson_times, trace_times
from deploy.bench.prompts import Prompts
from deploy.bench.server_figures import parse_counters, server_figures
from deploy.bench.workload import Shape, read_trace, uniform
from tests.bench.fake_openai import MODEL, FakeOpenAI

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,0,109
"""
MOONCAKE = """{"timestamp": 1500, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 7]}
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure_trace(tmp_path: Path) -> None:
    shapes = read_trace(written(tmp_path / "azure.csv", AZURE))
    assert shapes == [Shape(374, 44, 0.0), Shape(1, 109, 4.25)]


def test_mooncake_trace(tmp_path: Path) -> None:
    shapes = read_trace(written(tmp_path / "mooncake.jsonl", MOONCAKE))
    assert shapes == [Shape(1030, 500, 0.0, (0, 1, 2)), Shape(600, 4, 1.5, (0, 7))]
    assert trace_times(shapes, speed_up=3) == [0, 0.5]
    assert len(read_trace(tmp_path / "mooncake.jsonl", limit=1)) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2 is not a request"),
        ("a.csv", "one,two\n1,2\n", "line 2 is not a request"),
        ("a.jsonl", MOONCAKE + "[]\n", "line 3 is not a request"),
        ("a.csv", "", "holds no request"),
    ],
)
def test_a_broken_trace_names_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path / name, text))


def test_a_missing_trace_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_prompts_are_exact_unique_and_the_same_for_a_seed() -> None:
    shape = Shape(128, 1)
    prompts = [Prompts("seed").token_ids(index, shape) for index in range(50)]
    assert {len(prompt) for prompt in prompts} == {128}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 50
    assert all(1000 <= token < 30000 for prompt in prompts for token in prompt)
    assert prompts[3] == Prompts("seed").token_ids(3, shape)
    assert prompts[3][:16] != Prompts("other").token_ids(3, shape)[:16]
    assert len(Prompts("seed").text(0, shape).split()) == 128


def test_a_shared_prefix_is_shared_and_no_more() -> None:
    prompts = Prompts("seed", shared_prefix=100)
    first, second = (prompts.token_ids(index, Shape(128, 1)) for index in (0, 1))
    assert first[:100] == second[:100]
    assert first[100:] != second[100:]
    assert len(prompts.token_ids(2, Shape(30, 1))) == 30


def test_equal_trace_blocks_give_equal_tokens(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path / "mooncake.jsonl", MOONCAKE))
    prompts = Prompts("seed")
    long, short = prompts.token_ids(0, first), prompts.token_ids(1, second)
    assert (len(long), len(short)) == (1030, 600)
    assert long[:512] == short[:512]
    assert long[512:600] != short[512:600]


def test_poisson_times_have_the_rate() -> None:
    times = poisson_times(20_000, 5.0, seed=1)
    assert times[0] == 0
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # An exponential distribution's standard deviation is its mean.
    assert mean == pytest.approx(0.2, rel=0.03)
    assert variance**0.5 == pytest.approx(0.2, rel=0.05)


async def test_closed_loop_keeps_so_many_running_and_stops_in_time() -> None:
    running = peak = 0
    now = 0.0

    async def send(index: int, shape: Shape) -> Outcome:
        nonlocal running, peak, now
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        now += 1
        return Outcome(now)

    outcomes = await closed_loop(send, uniform(10, 1, 1), 3, float("inf"), lambda: now)
    assert (len(outcomes), peak) == (10, 3)
    now = 0.0
    assert len(await closed_loop(send, uniform(100, 1, 1), 1, 5.0, lambda: now)) == 5


async def test_open_loop_sends_at_its_times_whatever_still_runs() -> None:
    now = 50.0
    sent: list[float] = []
    release = asyncio.Event()

    async def sleep(seconds: float) -> None:
        nonlocal now
        # What was sent before gets its turn before time goes on.
        await asyncio.sleep(0)
        now += seconds

    async def send(index: int, shape: Shape) -> Outcome:
        sent.append(now)
        if index == 2:
            release.set()
        await release.wait()
        return Outcome(now)

    outcomes = await open_loop(send, uniform(3, 1, 1), [0.0, 1.5, 4.0], lambda: now, sleep)
    assert len(outcomes) == 3
    assert sent == [50.0, 51.5, 54.0]


METRICS = """# TYPE tandem_gateway_transfer_seconds counter
tandem_gateway_transfer_seconds_total {n}
# TYPE tandem_gateway_transfer_exposed_seconds counter
tandem_gateway_transfer_exposed_seconds_total 0.5
# TYPE tandem_gateway_request_seconds histogram
tandem_gateway_request_seconds_bucket{le="+Inf"} 4
tandem_gateway_request_seconds_count 4
tandem_gateway_request_seconds_sum 2.5
# TYPE process_cpu_seconds counter
process_cpu_seconds_total 5
# TYPE tandem_x counter
tandem_x_total{a="1"} 2
tandem_x_total{a="2"} 3
"""


def test_counters_are_summed_over_labels_and_only_tandems() -> None:
    counters = parse_counters(METRICS.replace("{n}", "2"))
    assert counters["tandem_x_total"] == 5
    assert counters["tandem_gateway_transfer_seconds_total"] == 2
    assert not any(name.startswith("process") for name in counters)


def test_hidden_share_is_what_was_not_exposed() -> None:
    before = {"tandem_gateway_transfer_seconds_total": 1.0, "tandem_gateway_transfer_exposed_seconds_total": 0.5}
    after = {"tandem_gateway_transfer_seconds_total": 5.0, "tandem_gateway_transfer_exposed_seconds_total": 0.9}
    assert server_figures(before, after)["transfer_hidden_share"] == 0.9
    assert server_figures(after, after) == {}
    assert server_figures({}, {}) == {}


async def bench(server: FakeOpenAI, *arguments: str) -> Result:
    """`tandem bench serve` in a thread of its own, against `server` on this loop."""
    async with server.serving() as url:
        full = ["serve", "--url", url, *arguments]
        return await asyncio.to_thread(CliRunner().invoke, command, full, catch_exceptions=False)


def report(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


async def test_levels_of_concurrency(tmp_path: Path) -> None:
    server = FakeOpenAI(metrics=METRICS)
    sizes = ("--prompt-tokens", "20", "--output-tokens", "8")
    result = await bench(server, "--concurrency", "1,4", *sizes, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0
    one, four = report(tmp_path / "out.json")["levels"]
    assert (one["load"], one["requests"], one["completed"], one["errors"]) == ("1 at once", 4, 4, {})
    assert (four["requests"], four["prompt_tokens"], four["output_tokens"]) == (16, 320, 128)
    assert one["server"]["tandem_gateway_transfer_seconds_total"] == 4
    # Two to warm up, then both levels; no two prompts begin alike.
    assert len(server.bodies) == 2 + 4 + 16
    assert len({tuple(body["prompt"][:8]) for body in server.bodies}) == len(server.bodies)
    body = server.bodies[-1]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == (MODEL, 8, True, True)
    assert "4 at once" in result.stdout


async def test_chat_with_words_counts_no_role_delta(tmp_path: Path) -> None:
    server = FakeOpenAI()
    out = tmp_path / "out.json"
    arguments = ("--endpoint", "chat", "--prompt", "text", "--concurrency", "1", "--num-requests", "2")
    result = await bench(server, *arguments, "--output-tokens", "3", "--prompt-tokens", "5", "--json", str(out))
    assert result.exit_code == 0
    level = report(out)["levels"][0]
    assert (level["completed"], level["output_tokens"], level["prompt_tokens"]) == (2, 6, 14)
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 5


async def test_trace_and_errors(tmp_path: Path) -> None:
    trace = written(tmp_path / "mooncake.jsonl", MOONCAKE)
    out = tmp_path / "out.json"
    arguments = ("--trace", str(trace), "--speed-up", "100", "--warm-up", "0", "--json", str(out))
    result = await bench(FakeOpenAI(fail_every=2), *arguments)
    assert result.exit_code == 0
    level = report(out)["levels"][0]
    assert (level["load"], level["completed"], level["errors"]) == ("trace x100", 1, {"503 overloaded": 1})


async def test_poisson_rate(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--rate", "500", "--num-requests", "10", "--output-tokens", "1", "--json", str(out))
    result = await bench(FakeOpenAI(), *arguments)
    assert result.exit_code == 0
    level = report(out)["levels"][0]
    assert (level["load"], level["completed"]) == ("500 a second", 10)
    # One token has no time per further token.
    assert level["tpot_ms"] is None
