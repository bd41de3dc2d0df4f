"""A transport between the threads of one process: the peers' regions are plain tensors, and a write is over at once."""

import threading
from collections import deque

from torch import Tensor

from kv_store.transport.base import Notification, PeerUnreachable, WriteState


class MemoryNetwork:
    """The agents of one process that can reach each other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: dict[str, MemoryTransport] = {}

    def transport(self, agent: str) -> "MemoryTransport":
        transport = MemoryTransport(self, agent)
        with self._lock:
            assert agent not in self._agents, f"agent {agent} exists"
            self._agents[agent] = transport
        return transport

    def find(self, agent: str) -> "MemoryTransport | None":
        with self._lock:
            return self._agents.get(agent)

    def remove(self, agent: str) -> None:
        with self._lock:
            self._agents.pop(agent, None)


class MemoryTransport:
    """One agent; a write is done as soon as it is posted."""

    kind = "memory"
    revokes_on_disconnect = False

    def __init__(self, network: MemoryNetwork, agent: str) -> None:
        self.agent = agent
        self.staging: Tensor | None = None
        self.inbox: deque[Notification] = deque()
        self._network = network
        self._source: Tensor | None = None
        self._peers: set[str] = set()

    def register_staging(self, memory: Tensor) -> None:
        self.staging = memory

    def register_source(self, memory: Tensor) -> None:
        self._source = memory

    def metadata(self) -> bytes:
        return self.agent.encode()

    def connect(self, peer: str, metadata: bytes, staging_base: int) -> None:
        if metadata.decode() != peer or self._network.find(peer) is None:
            raise PeerUnreachable(f"there is no agent {peer}")
        self._peers.add(peer)

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)

    def write(self, peer: str, source_offset: int, offset: int, length: int, notification: bytes) -> "MemoryWrite":
        if peer not in self._peers:
            raise PeerUnreachable(f"{peer} is not connected")
        assert self._source is not None, "register_source comes first"
        target = self._network.find(peer)
        if target is None or target.staging is None:
            return MemoryWrite(WriteState.FAILED)
        target.staging[offset : offset + length].copy_(self._source[source_offset : source_offset + length])
        target.inbox.append(Notification(self.agent, notification))
        return MemoryWrite(WriteState.DONE)

    def poll(self) -> list[Notification]:
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def close(self) -> None:
        self._network.remove(self.agent)


class MemoryWrite:
    """A write that was over when it was posted."""

    def __init__(self, state: WriteState) -> None:
        self._state = state

    def state(self) -> WriteState:
        return self._state

    def release(self) -> None:
        return
