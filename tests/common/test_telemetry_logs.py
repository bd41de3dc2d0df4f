"""Log lines as text and as JSON."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from common.telemetry.logs import JsonFormatter, LogFormat, TextFormatter, configure_logging


def record(message: str, *args: object, exc_info: Any = None, **extra: object) -> logging.LogRecord:
    return logging.getLogger("decode_svc.worker").makeRecord(
        "decode_svc.worker", logging.WARNING, "f.py", 1, message, args, exc_info, extra=extra
    )


def failure() -> Any:
    try:
        raise ValueError("boom")
    except ValueError:
        return sys.exc_info()


def test_text_is_one_line_with_the_events_own_fields() -> None:
    line = TextFormatter().format(record("lost %s", "p1", transfers=3, reason="why"))
    clock, rest = line.split(" ", 1)
    assert len(clock) == len("12:00:00.123") and clock.count(":") == 2
    assert rest == "WARNING decode_svc.worker: lost p1 transfers=3 reason=why"


def test_text_shows_the_traceback_below() -> None:
    lines = TextFormatter().format(record("failed", exc_info=failure())).splitlines()
    assert lines[0].endswith("decode_svc.worker: failed") and lines[-1] == "ValueError: boom"


def test_json_is_one_object_on_one_line() -> None:
    line = JsonFormatter().format(record("lost %s\nfor good", "p1", transfers=3, odd={1}, exc_info=failure()))
    assert "\n" not in line
    event = json.loads(line)
    assert event["message"] == "lost p1\nfor good"
    assert (event["level"], event["logger"], event["transfers"], event["odd"]) == (
        "WARNING",
        "decode_svc.worker",
        3,
        "{1}",
    )
    assert event["time"] == pytest.approx(event["time"]) and "ValueError: boom" in event["exception"]


def test_json_without_extras_has_only_what_every_event_has() -> None:
    assert set(json.loads(JsonFormatter().format(record("x")))) == {"time", "level", "logger", "message"}


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize(("log_format", "start"), [("text", ""), ("json", "{")])
def test_the_process_logs_to_stderr_once(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, log_format: LogFormat, start: str
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    configure_logging("error", log_format)
    configure_logging("info", log_format)
    logging.getLogger("some.module").info("hello")
    logging.getLogger("some.module").debug("not this")
    logging.getLogger("httpx").info("nor this")
    (line,) = stderr.getvalue().splitlines()
    assert "hello" in line and line.startswith(start)
