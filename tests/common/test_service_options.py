"""Worker options from arguments and environment."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from common.config import Address
from common.service.options import EngineOptions, ProcessOptions, split_options, thread_count, worker_options


def parse(*args: str, **environment: str) -> tuple[EngineOptions, ProcessOptions, dict[str, Any]]:
    results = []

    @click.command()
    @click.option("--own", default="mine")
    @worker_options
    def command(**values: Any) -> None:
        results.append(split_options(values))

    outcome = CliRunner().invoke(command, args, env=environment, catch_exceptions=False)
    if outcome.exit_code:
        raise click.UsageError(outcome.output)
    return results[0]


def test_the_defaults_serve_the_demo_model_on_loopback() -> None:
    engine, process, rest = parse()
    assert (engine.model, engine.device, engine.block_size, engine.num_blocks) == ("demo", "auto", 16, None)
    assert (engine.staging_memory, engine.slot_bytes, engine.checksum) == (64 << 20, 1 << 20, False)
    assert (process.host, process.port, process.redis, process.advertise) == ("127.0.0.1", 0, "", None)
    assert rest == {"own": "mine"}


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("--model", "some/model", "some/model"),
        ("--served-model-name", "x", "x"),
        ("--device", "cpu", "cpu"),
        ("--dtype", "bfloat16", "bfloat16"),
        ("--block-size", "8", 8),
        ("--kv-memory", "1.5GB", 1_500_000_000),
        ("--num-blocks", "100", 100),
        ("--max-model-len", "512", 512),
        ("--max-batch-tokens", "64", 64),
        ("--max-batch-size", "3", 3),
        ("--max-waiting", "0", 0),
        ("--step-seconds", "0.1", 0.1),
        ("--threads", "2", 2),
        ("--transport", "grpc", "grpc"),
        ("--staging-memory", "8MiB", 8 << 20),
        ("--slot-bytes", "64KiB", 64 << 10),
        ("--worker-id", "w", "w"),
        ("--host", "0.0.0.0", "0.0.0.0"),
        ("--port", "1234", 1234),
        ("--advertise", "host:99", Address("host", 99)),
        ("--redis", "redis://r", "redis://r"),
        ("--log-level", "debug", "debug"),
        ("--log-format", "json", "json"),
        ("--metrics-port", "9100", 9100),
        ("--drain-seconds", "1.5", 1.5),
    ],
)
def test_each_option_comes_from_an_argument_or_the_environment(argument: str, value: str, expected: object) -> None:
    name = argument.removeprefix("--").replace("-", "_")
    for engine, process, _ in (parse(argument, value), parse(**{f"TANDEM_{name.upper()}": value})):
        owner = engine if name in EngineOptions.__dataclass_fields__ else process
        assert getattr(owner, name) == expected


def test_a_flag_comes_from_the_environment_too() -> None:
    assert parse("--checksum")[0].checksum
    assert parse(TANDEM_CHECKSUM="1")[0].checksum
    assert not parse("--no-checksum", TANDEM_CHECKSUM="1")[0].checksum


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--block-size", "0"),
        ("--kv-memory", "lots"),
        ("--num-blocks", "1"),
        ("--device", "tpu"),
        ("--port", "70000"),
        ("--advertise", "nowhere"),
        ("--step-seconds", "0"),
        ("--threads", "0"),
        ("--drain-seconds", "-1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(argument: str, value: str) -> None:
    with pytest.raises(click.UsageError, match=argument):
        parse(argument, value)


def test_threads_default_to_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5})
    assert thread_count(parse()[0]) == 3
    assert thread_count(parse("--threads", "7")[0]) == 7
