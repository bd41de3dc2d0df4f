"""TCP ports of this machine: free ones for workers, and a clear word when a wanted one is taken."""

import errno
import random
import socket

from common.config import Address
from common.errors import ConfigError

#: Below the ports that systems give to outgoing connections, one of which could take a worker's while it restarts.
_PORTS = range(15_000, 32_000)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; nobody keeps it reserved."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket(_family(host)) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port


def require_free(address: Address, option: str) -> None:
    """Check that `address` can be listened on, as a server would (one just killed is no hindrance).

    Raises:
        ConfigError: it cannot; the message names the address, `field` the option.
    """
    with socket.socket(_family(address.host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
            # Two sockets may be bound with SO_REUSEADDR as long as one does not listen.
            probe.listen(1)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = "is already in use" if taken else f"cannot be used: {error.strerror}"
            raise ConfigError(f"port {address.port} on {address.host} {reason}", field=option) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
