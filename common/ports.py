"""TCP ports that a server is told to listen on."""

import socket

from common.errors import ConfigError


def check_port_is_free(host: str, port: int, option: str) -> None:
    """Raise ConfigError naming `option` if nothing can listen there now. Port 0 is always free."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A port in TIME_WAIT is free for us, as it is for the server later.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", field=option) from error
