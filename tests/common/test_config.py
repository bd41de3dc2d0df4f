"""Sizes, addresses, options from variables, and errors in one line."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import (
    BYTES,
    HOST_PORT,
    Address,
    format_bytes,
    option,
    parse_address,
    parse_bytes,
    run_command,
)
from common.errors import ConfigError, NoWorker


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2kb", 2000), (" 3M ", 3 << 20), ("1TB", 10**12)],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 apple", "1e3", "1.", "nan", "1GiB2"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as"):
        parse_bytes(text)


@given(st.integers(0, 1 << 45))
def test_a_formatted_size_reads_back_nearly(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=1e-3, abs=1)


@pytest.mark.parametrize(
    ("text", "address"),
    [("h:1", Address("h", 1)), ("[::1]:65535", Address("::1", 65535)), ("1.2.3.4:80", Address("1.2.3.4", 80))],
)
def test_parse_address_and_back(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "h", "h:", ":1", "h:0", "h:65536", "h:x", "::1:80", "h:-1", "h:²"])
def test_parse_address_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT|the port must be"):
        parse_address(text)


@click.command()
@option("--kv-memory", type=BYTES, default="1KiB", help="Memory.")
@option("--decode", type=HOST_PORT, multiple=True, help="Peers.")
@option("--fail", help="How to fail.")
def command(kv_memory: int, decode: tuple[Address, ...], fail: str | None) -> int:
    if fail == "config":
        raise ConfigError("too\nlarge", field="--kv-memory")
    if fail == "worker":
        raise NoWorker("none left")
    if fail == "interrupt":
        raise KeyboardInterrupt
    if fail == "bug":
        raise ZeroDivisionError
    click.echo(f"{kv_memory} {' '.join(map(str, decode))}")
    return 3


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        run_command(command, list(arguments), "test")
    return left.value.code


def test_variables_defaults_and_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 3
    monkeypatch.setenv("TANDEM_KV_MEMORY", "2KiB")
    monkeypatch.setenv("TANDEM_DECODE", "a:1 [::1]:2")
    assert run() == 3
    assert run("--kv-memory", "5", "--decode", "b:3") == 3
    assert capsys.readouterr().out == "1024 \n2048 a:1 [::1]:2\n5 b:3\n"


def test_help_shows_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "[env var: TANDEM_KV_MEMORY; default: 1KiB]" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--fail", "config"), "--kv-memory: too large"),
        (("--fail", "worker"), "none left"),
        (("--kv-memory", "x"), "Invalid value for '--kv-memory' (env var: 'TANDEM_KV_MEMORY'): 'x' is not a size"),
        (("--decode", "h:0"), "'h:0': the port must be a number from 1 to 65535"),
        (("stray",), "Got unexpected extra argument (stray)"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tandem: error: ")
    assert line in err
    assert err.count("\n") == 1


def test_an_interrupt_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--fail", "interrupt") == 130
    out, err = capsys.readouterr()
    assert (out + err).strip() == ""


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(command, ["--fail", "bug"], "test")
