"""Whether a server could listen: taken ports, names of hosts, and addresses that are not of this machine."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import ConfigError
from common.ports import check_port_is_free

#: Reserved for documents: no machine has it.
ELSEWHERE = "192.0.2.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Any name stands for these addresses."""
    known = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        return [entry for address in addresses for entry in known(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_taken_port_is_named(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken}: Address already in use") as caught:
        check_port_is_free("127.0.0.1", taken, "--port")
    assert caught.value.field == "--port"


def test_any_port_is_always_free() -> None:
    check_port_is_free("nowhere.invalid", 0, "--port")


def test_a_name_of_addresses_of_which_only_some_are_here(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    resolving(monkeypatch, ELSEWHERE, "127.0.0.1")
    with pytest.raises(ConfigError, match="already in use"):
        check_port_is_free("host", taken, "--port")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_port_is_free("host", port, "--port")


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        check_port_is_free(ELSEWHERE, 50051, "--port")


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on nowhere\.invalid:50051"):
        check_port_is_free("nowhere.invalid", 50051, "--port")


def test_a_name_of_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
            listener.listen()
            resolving(monkeypatch, "::1")
            port = listener.getsockname()[1]
            with pytest.raises(ConfigError, match="already in use"):
                check_port_is_free("host", port, "--port")
    except OSError:
        pytest.skip("this machine has no IPv6")
    check_port_is_free("host", port, "--port")
