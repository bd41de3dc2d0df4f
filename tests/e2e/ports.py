"""Ports for processes that listen only seconds later, and that keep their ports over restarts.

A port is free for as long as nobody listens on it: without a claim, two clusters that start at the same time, each in a
pytest of its own, can be given the same one.
"""

import errno
import socket

from deploy.ports import free_port


class Ports:
    """Free ports that no other `Ports` of this machine gives away until they are given back or this process ends."""

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def take(self) -> int:
        while True:
            port = free_port()
            claim = socket.socket(socket.AF_UNIX)
            try:
                # An abstract name: it leaves no file, and goes with the process that has it.
                claim.bind(f"\0tandem-test-port-{port}")
            except OSError as error:
                claim.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._claims.append(claim)
            return port

    def give_back(self) -> None:
        for claim in self._claims:
            claim.close()
        self._claims.clear()
