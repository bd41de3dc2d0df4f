"""TCP ports that a server is told to listen on."""

import errno
import socket

from common.errors import ConfigError

#: A name may stand for addresses that this machine does not have; a server listens on the others.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def check_port_is_free(host: str, port: int, option: str) -> None:
    """Raise ConfigError naming `option` if nothing can listen there now. Port 0 is always free."""
    if port == 0:
        return
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        problems = [_problem(family, address) for family, _, _, _, address in addresses]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", field=option) from error
    if None not in problems:
        raise ConfigError(f"cannot listen on {host}:{port}: {problems[0]}", field=option)


def _problem(family: int, address: tuple[object, ...]) -> str | None:
    """Why this machine does not have the address, if so. Raises OSError if it does, and cannot listen there."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # A port in TIME_WAIT is free for us, as it is for the server later.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return error.strerror
    return None
