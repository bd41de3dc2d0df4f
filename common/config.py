"""How commands read their options: each also from `TANDEM_<NAME>`, a wrong value refused in one line with exit code 2.

It knows click and the exception tree; it knows no service and no option of one.
"""

import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import click

from common.errors import TandemError

ENV_PREFIX = "TANDEM_"
EXIT_USAGE = 2
#: Begins the one line that says why a command ended with EXIT_USAGE.
ERROR_PREFIX = "tandem: error: "
EXIT_INTERRUPTED = 128 + signal.SIGINT

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    # A bare letter means what people mean by it for memory: powers of two.
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Bytes in `text`: a number with an optional unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB; K, M, G, T = KiB, ...).

    Raises:
        ValueError: not such a number.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 1.5GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(size: int) -> str:
    """`size` in the largest binary unit in which it is at least one, for messages."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.4g}{unit}"
    return f"{size}B"


class ByteSize(click.ParamType[int]):
    """Click type of a memory size; converts to bytes."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a listener. IPv6 hosts are kept without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """`HOST:PORT` or `[IPv6]:PORT`.

    Raises:
        ValueError: no host, no port, or a port outside 1..65535.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is not HOST:PORT")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"{text!r}: the port must be a number from 1 to 65535")
    return Address(host[1:-1] if bracketed else host, int(port))


class HostPort(click.ParamType[Address]):
    """Click type of `HOST:PORT`; converts to `Address` (its `str()` is a gRPC target)."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        if isinstance(value, Address):
            return value
        try:
            return parse_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def check_redis_url(text: str) -> str:
    """`text`, if it can be the URL of a Redis (or empty, for none).

    Raises:
        ValueError: it cannot; the message does not repeat it, for it may hold a password.
    """
    if not text:
        return text
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("redis", "rediss", "unix"):
        raise ValueError("a Redis URL begins with redis://, rediss:// or unix://")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("the Redis URL's port must be a number from 1 to 65535") from None
    if port == 0 or (scheme == "unix" and not parts.path):
        raise ValueError("the Redis URL names no port" if port == 0 else "unix:// needs the path of a socket")
    if scheme != "unix" and not rest:
        raise ValueError("the Redis URL names no host")
    return text


class RedisUrl(click.ParamType[str]):
    """Click type of a Redis URL, kept as it is."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return check_redis_url(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


BYTES = ByteSize()
REDIS_URL = RedisUrl()
HOST_PORT = HostPort()
PORT = click.IntRange(1, 65535)
#: A port where 0 means "any free one" (or "off", where the option says so).
PORT_OR_ZERO = click.IntRange(0, 65535)


def option(*names: str, **kwargs: Any) -> Callable[[F], F]:
    """`click.option` that also reads `TANDEM_<NAME>` and shows default and variable in `--help`.

    The variable's name comes from the first long name: `--http-port` gives TANDEM_HTTP_PORT. A repeatable option
    takes its values from the variable separated by white space (click's rule).
    """
    long_name = next(name for name in names if name.startswith("--"))
    flag = long_name.split("/")[0].removeprefix("--")
    kwargs.setdefault("envvar", ENV_PREFIX + flag.replace("-", "_").upper())
    kwargs.setdefault("show_envvar", True)
    kwargs.setdefault("show_default", True)
    return click.option(*names, **kwargs)


def one_line(message: str) -> str:
    """`message` on one line: log collectors and people both read the last line."""
    return " ".join(message.split())


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """Say why in one line on stderr and leave."""
    print(f"{ERROR_PREFIX}{one_line(message)}", file=sys.stderr, flush=True)
    sys.exit(code)


def run_command(command: click.Command, args: list[str] | None = None, prog_name: str | None = None) -> NoReturn:
    """Run `command` on the process's arguments and leave with its exit code.

    Wrong usage, wrong values and every `TandemError` become one line on stderr and exit code 2 (which tells a
    supervisor that starting again is useless); Ctrl-C gives 130. Anything else is a bug and keeps its traceback.
    A command may return its exit code.
    """
    try:
        result = command.main(args=args, prog_name=prog_name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.ctx.get_help() if error.ctx else error.format_message(), file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except click.ClickException as error:
        fail(error.format_message())
    except TandemError as error:
        named = f"{error.field}: {error.message}" if error.field else error.message
        fail(named)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(result if isinstance(result, int) else 0)
