"""The HTTP port is bound early, refused in words, and without Nagle's delay."""

import asyncio
import socket

import pytest

from common.errors import ConfigError
from gateway.http.listen import bind


def test_port_in_use_names_address_and_port() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_unknown_host() -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("no.such.host.invalid", 0)


async def test_accepted_connections_have_no_delay() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def on_connection(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(on_connection, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await accepted
        writer.close()
        await writer.wait_closed()
