"""The key that commands send: from their option, or from what the gateway of this machine was started with."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from common.errors import ConfigError
from deploy.api_key import auth_headers, own_headers
from deploy.chat import command as chat
from deploy.status import command as status


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ("", {}),
        (" ", {}),
        ("one", {"Authorization": "Bearer one"}),
        ("one two", {"Authorization": "Bearer one"}),
        (" one\n", {"Authorization": "Bearer one"}),
    ],
)
def test_the_first_key_is_sent(key: str, headers: dict[str, str]) -> None:
    assert auth_headers(key) == headers
    assert own_headers({"TANDEM_API_KEY": key}) == headers


def test_the_file_of_the_gateway_will_do(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nada:from-file:2\nother\n", "utf-8")
    environ = {"TANDEM_API_KEY_FILE": str(file)}
    assert own_headers(environ) == {"Authorization": "Bearer from-file"}
    assert own_headers({**environ, "TANDEM_API_KEY": "own"}) == {"Authorization": "Bearer own"}
    assert own_headers({}) == {}
    with pytest.raises(ConfigError):
        own_headers({"TANDEM_API_KEY_FILE": str(tmp_path / "missing")})


@pytest.fixture
def server() -> Iterator[tuple[str, list[str | None]]]:
    """A server that refuses everybody, and the `Authorization` headers that it was sent."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_error(401)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", seen
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("command", [chat, status])
def test_commands_send_it(
    command: object, server: tuple[str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = server
    CliRunner().invoke(command, ["--url", url])  # type: ignore[arg-type]
    CliRunner().invoke(command, ["--url", url, "--api-key", "given"])  # type: ignore[arg-type]
    monkeypatch.setenv("TANDEM_API_KEY", "from-env another")
    CliRunner().invoke(command, ["--url", url])  # type: ignore[arg-type]
    assert seen == [None, "Bearer given", "Bearer from-env"]
