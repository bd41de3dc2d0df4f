"""The `tandem` command: what it imports, where options come from, how it refuses."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from common.config import run_command
from deploy.chat import command as chat
from deploy.cli import COMMANDS, tandem
from deploy.ports import free_port
from deploy.status import command as status

PORTS = ("--http-port", str(free_port()), "--grpc-port", str(free_port()))

HEAVY = ("torch", "transformers", "grpc", "nixl", "fastapi", "redis")

WORKER = {
    "id": "decode-0",
    "role": "decode",
    "pid": 42,
    "addresses": ["127.0.0.1:7000"],
    "incarnation": "abc",
    "state": "ready",
    "blocks": {"total": 64, "free": 60, "cached": 3, "owned": 1},
    "running": 1,
    "waiting": 2,
    "refused": ["127.0.0.1:7001: num_layers: 2 here, 3 there"],
}
NEVER_MET = {
    **WORKER,
    "id": "127.0.0.1:7009",
    "pid": 0,
    "state": "lost",
    "reason": "connection refused",
    "addresses": {"grpc": "127.0.0.1:7009"},
    "age": None,
    "refused": [],
}
STATUS = {
    "workers": [WORKER, NEVER_MET],
    "queue": {"waiting": 5, "tenants": {"default": 5}},
    "ratio": {"wanted": 0.25, "prefill_speed": 19423.7},
}


Refuse = Callable[..., str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs `tandem ARGUMENTS`, which must end with exit code 2, and gives its stderr."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            run_command(tandem, list(arguments), "tandem")
        out, err = capsys.readouterr()
        assert (left.value.code, out) == (2, "")
        return err

    return run


def imported_by(*arguments: str) -> set[str]:
    """Heavy packages that `tandem ARGUMENTS` has loaded when it ends."""
    code = f"""
import atexit, sys
atexit.register(lambda: print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr))
sys.argv = ["tandem", *{arguments!r}]
from deploy.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("name", "needed"),
    # `up` asks the Redis that it is given whether it is there.
    [("status", set()), ("chat", set()), ("bench", set()), ("up", {"redis"})],
)
def test_light_subcommands_import_nothing_heavy(name: str, needed: set[str]) -> None:
    assert imported_by(name, "--help") <= needed


def test_the_overview_imports_no_subcommand_and_lists_all() -> None:
    assert imported_by("--help") == set()
    shown = CliRunner().invoke(tandem, ["--help"]).stdout
    assert all(f"  {name} " in shown and entry.summary in shown for name, entry in COMMANDS.items())


@pytest.mark.parametrize("name", ["up", "status", "chat"])
def test_every_option_has_a_variable_and_help(name: str) -> None:
    command = tandem.get_command(click.Context(tandem), name)
    assert command is not None
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert options
    for option in options:
        assert str(option.envvar).startswith("TANDEM_"), option
        assert option.help, option


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "--http-port", "x"), "Invalid value for '--http-port' (env var: 'TANDEM_HTTP_PORT'): 'x' is not"),
        (("up", "--decode", "0"), "'--decode' (env var: 'TANDEM_DECODE'): 0 is not in the range x>=1"),
        (("up", "--kv-memory", "3 apples"), "'3 apples' is not a size such as 512MiB or 1.5GB"),
        (("up", "--dtype", "int3"), "'int3' is not one of 'auto', 'float32', 'float16', 'bfloat16'"),
        (("up", *PORTS, "--model", "/no/such/folder"), "--model: no such model folder, and not a hub id"),
        (("up", *PORTS, "--model", "no-such-folder"), "--model: no such model folder, and not a hub id"),
        (("up", "--no-such-option"), "No such option '--no-such-option'"),
        (("up", "--model"), "Option '--model' requires an argument"),
        (("fly",), "No such command 'fly'"),
        (("status", "--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 gives no status"),
        *(
            ((*command, "--url", url), f"'--url' (env var: 'TANDEM_URL'): {url!r}")
            for command in (("status",), ("chat",), ("bench", "serve"))
            for url in ("nonsense", "ftp://host", "http://", "http://[::1", "http://host:99999", "http://host:x")
        ),
        *(
            ((*command, "--redis", url), "'--redis' (env var: 'TANDEM_REDIS'): ")
            for command in (("up",), ("gateway",), ("prefill",), ("decode",))
            for url in ("nonsense", "http://host", "redis:/host", "redis://", "unix://", "redis://host:0")
        ),
        (("bench", "serve", "--json", "/no/such/folder/out.json"), "--json: /no/such/folder is not a folder"),
        (("gateway", "--http-port", "65536"), "'--http-port' (env var: 'TANDEM_HTTP_PORT'): 65536 is not in the range"),
        (("gateway", "--decode", "host"), "'--decode' (env var: 'TANDEM_DECODE'): 'host' is not HOST:PORT"),
        (("decode", "--port", "x"), "'--port' (env var: 'TANDEM_PORT'): 'x' is not"),
        *(
            ((name, "--model", "/no/such/folder"), "--model: no such model folder")
            for name in ("gateway", "prefill", "decode")
        ),
        (("bench", "serve", "--concurrency", "1,x"), "'1,x' is not a list of numbers such as 1,4,16"),
        (("bench", "serve", "--endpoint", "chat"), "--endpoint: the chat API takes no token ids"),
        (("bench", "serve", "--trace", "/no/file.csv"), "--trace: /no/file.csv: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(refuse: Refuse, arguments: tuple[str, ...], message: str) -> None:
    said = refuse(*arguments)
    assert said.startswith("tandem: error: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "gateway", "prefill", "decode"])
@pytest.mark.parametrize("url", ["redis://:s3/cret@host:6379", "rediss://me:s3cret@host:x", "s3cret@host"])
def test_a_refused_redis_url_is_not_repeated(refuse: Refuse, command: str, url: str) -> None:
    """It may hold a password."""
    said = refuse(command, "--redis", url)
    assert "Redis URL" in said
    assert "s3" not in said


def test_the_script_says_it_too() -> None:
    command = [sys.executable, "-m", "deploy.cli", "up", "--decode", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tandem: error: Invalid value for '--decode'")
    assert done.stderr.count("\n") == 1


def test_a_folder_without_a_model_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    said = refuse("up", *PORTS, "--model", str(tmp_path))
    assert said == f"tandem: error: --model: {tmp_path} is not a model folder: it has no config.json\n"


def test_options_come_from_variables_and_the_command_line_wins(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HTTP_PORT", "99999")
    assert "'--http-port' (env var: 'TANDEM_HTTP_PORT'): 99999" in refuse("up")
    assert "no such model folder" in refuse("up", *PORTS, "--model", "/no")


@pytest.fixture
def gateway() -> Iterator[str]:
    """URL of a server that answers with a status, one model, and a streamed `Hi there`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(STATUS if self.path == "/tandem/status" else {"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            count = len(sent["messages"])
            if count > 3:
                self._answer({"error": {"message": "too many messages"}}, 400)
                return
            options = {name: sent[name] for name in sent if name not in ("model", "messages", "stream")}
            texts = (
                ("Hi", f" there {count}") if sent["messages"][-1]["content"] != "options" else (json.dumps(options),)
            )
            pieces = [{"choices": [{"delta": {"content": text}}]} for text in texts]
            lines = [*map(json.dumps, pieces), "[DONE]"]
            self._write("".join(f"data: {line}\n\n" for line in lines).encode())

        def _answer(self, body: Any, code: int = 200) -> None:
            self._write(json.dumps(body).encode(), code)

        def _write(self, body: bytes, code: int = 200) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_status_as_json_is_the_gateways_answer(gateway: str) -> None:
    done = CliRunner().invoke(status, ["--url", gateway, "--json"], catch_exceptions=False)
    assert json.loads(done.stdout) == STATUS


def test_status_as_a_table(gateway: str) -> None:
    shown = CliRunner().invoke(status, ["--url", gateway + "/"], catch_exceptions=False, env={"COLUMNS": "160"}).stdout
    row = next(line for line in shown.splitlines() if line.startswith("decode-0 "))
    assert row.split() == ["decode-0", "decode", "ready", "42", "127.0.0.1:7000", *("64", "60", "3", "1", "1", "2")]
    assert "decode-0 does not pair with 127.0.0.1:7001: num_layers: 2 here, 3 there" in shown
    row = next(line for line in shown.splitlines() if line.startswith("127.0.0.1:7009 "))
    assert row.split()[2:] == ["lost", "-", "127.0.0.1:7009", *"------"]
    assert "127.0.0.1:7009 is lost: connection refused" in shown
    assert "queue: waiting 5, tenants.default 5" in shown
    assert "ratio: wanted 0.250, prefill_speed 19424" in shown


def test_a_status_is_cut_nowhere_however_narrow_the_terminal(gateway: str) -> None:
    narrow, wide = (
        CliRunner().invoke(status, ["--url", gateway], catch_exceptions=False, env={"COLUMNS": columns}).stdout
        for columns in ("40", "200")
    )
    assert narrow == wide


def test_chat_keeps_the_conversation_until_reset(gateway: str) -> None:
    lines = "one\ntwo\n\n/what\nthree\n/reset\nfour\n/quit\nnever\n"
    done = CliRunner().invoke(chat, ["--url", gateway], input=lines, catch_exceptions=False)
    assert done.exit_code == 0
    answers = [line.lstrip("> ") for line in done.stdout.splitlines() if "there" in line]
    # 1 message, then 3 with the first turn; the third turn is refused with 5, and /reset begins anew.
    assert answers == ["Hi there 1", "Hi there 3", "Hi there 1"]
    assert "error: too many messages" in done.stderr
    assert "never" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {"max_tokens": 512, "temperature": 0.6, "top_p": 0.95}),
        (("--temperature", "0", "--max-tokens", "7"), {"max_tokens": 7, "temperature": 0.0, "top_p": 0.95}),
        (("--server-sampling",), {"max_tokens": 512}),
        (("--server-sampling", "--temperature", "1"), {"max_tokens": 512, "temperature": 1.0}),
    ],
)
def test_how_chat_draws(gateway: str, arguments: tuple[str, ...], options: dict[str, float]) -> None:
    done = CliRunner().invoke(chat, ["--url", gateway, *arguments], input="options\n/quit\n", catch_exceptions=False)
    (answer,) = [line.lstrip("> ") for line in done.stdout.splitlines() if "max_tokens" in line]
    assert json.loads(answer) == options


def test_the_readme_names_only_options_that_there_are() -> None:
    """And with the defaults that they have, where it gives a plain one."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    up = tandem.get_command(click.Context(tandem), "up")
    assert up is not None
    defaults = {name: param.default for param in up.params for name in param.opts}
    rows = re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|", readme, re.MULTILINE)
    assert len(rows) > 10
    for names, shown in rows:
        options = re.findall(r"`(--[a-z-]+)`", names)
        assert set(options) <= defaults.keys()
        for option, value in zip(options, shown.split(", "), strict=False):
            if isinstance(default := defaults[option], int | float):
                assert float(value) == default, option
