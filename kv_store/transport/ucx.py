"""UCX one-sided writes through nixl. The only module that imports nixl.

Which wires UCX uses is the user's affair (`UCX_TLS`; unset, UCX picks the best it finds). A restricted list must
name `tcp` (or an RDMA transport): over shared memory alone UCX cannot tell that a peer died and refuses to connect.

No thread of nixl's own: `poll` progresses everything, on both sides, also while two agents find each other.
"""

import importlib
import importlib.util
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kv_store.transport.base import Notification, PeerUnreachable, WriteState

logger = logging.getLogger(__name__)

#: Distributions of the same library for different CUDA majors; any of them serves machines without a GPU.
NIXL_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
#: What precedes nixl's own metadata: memory kind of the staging region and its device.
_HEADER = struct.Struct("<4sI")
_PENDING_STATE = "PROC"
_DONE_STATE = "DONE"


def _load_nixl() -> Any:
    """The nixl package that is installed, with its log lines sent through ours instead of to stdout."""
    name = next((module for module in NIXL_MODULES if importlib.util.find_spec(module)), None)
    if name is None:
        raise ImportError("nixl is not installed (pip install 'tandem-serve[ucx]')")
    raise_exceptions = logging.raiseExceptions
    module = importlib.import_module(name)
    logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        nixl_logger.setLevel(logging.WARNING)
    return module


_nixl = _load_nixl()
_bindings = importlib.import_module(f"{_nixl.__name__}._bindings")
#: nixl's errors have no common base.
_ERRORS: tuple[type[Exception], ...] = tuple(
    value
    for name, value in vars(_bindings).items()
    if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
)


class UcxTransport:
    """One nixl agent with one UCX backend, one registered source region and one registered staging region."""

    kind = "ucx"
    #: Forgetting a peer does not take its memory handle from it.
    revokes_on_disconnect = False

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self._nixl = _nixl.nixl_agent(agent, _nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        # Without error handling by peer the death of one may hang or abort this process.
        self._nixl.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        self._source: Tensor | None = None
        self._staging: Tensor | None = None
        self._registered: list[Any] = []
        #: Made once, so that other threads may read it.
        self._metadata = b""
        #: Memory kind, device and base address of each connected peer's staging region.
        self._peers: dict[str, tuple[str, int, int]] = {}

    def register_staging(self, memory: Tensor) -> None:
        assert self._staging is None, "the staging region is registered once"
        self._staging = memory
        self._registered.append(self._nixl.register_memory(memory))
        kind, device = _kind_of(memory)
        self._metadata = _HEADER.pack(kind.encode(), device) + self._nixl.get_agent_metadata()

    def register_source(self, memory: Tensor) -> None:
        assert self._source is None, "the source region is registered once"
        self._source = memory
        self._registered.append(self._nixl.register_memory(memory))

    def metadata(self) -> bytes:
        assert self._metadata, "register_staging comes first"
        return self._metadata

    def connect(self, peer: str, metadata: bytes, staging_base: int) -> None:
        if len(metadata) <= _HEADER.size:
            raise PeerUnreachable(f"{peer} sent {len(metadata)} bytes of UCX metadata")
        kind, device = _HEADER.unpack_from(metadata)
        with _unreachable(peer):
            name = self._nixl.add_remote_agent(metadata[_HEADER.size :])
        found = name.decode() if isinstance(name, bytes) else str(name)
        if found != peer:
            raise PeerUnreachable(f"the metadata of {peer} is that of {found}")
        self._peers[peer] = (kind.decode(), device, staging_base)
        with _unreachable(peer):
            self._nixl.make_connection(peer)
            # The first message sets the wires up; an empty one does it before any KV waits for them.
            self._nixl.send_notif(peer, b"")

    def disconnect(self, peer: str) -> None:
        if self._peers.pop(peer, None) is None:
            return
        try:
            self._nixl.remove_remote_agent(peer)
        except _ERRORS as error:
            logger.info("nixl had forgotten %s already: %s", peer, error)

    def write(self, peer: str, source_offset: int, offset: int, length: int, notification: bytes) -> "UcxWrite":
        assert self._source is not None, "register_source comes first"
        if peer not in self._peers:
            raise PeerUnreachable(f"{peer} is not connected")
        kind, device, base = self._peers[peer]
        own_kind, own_device = _kind_of(self._source)
        local = self._nixl.get_xfer_descs([(self._source.data_ptr() + source_offset, length, own_device)], own_kind)
        remote = self._nixl.get_xfer_descs([(base + offset, length, device)], kind)
        with _unreachable(peer):
            handle = self._nixl.initialize_xfer("WRITE", local, remote, peer, notification)
        write = UcxWrite(self._nixl, handle)
        write.post()
        return write

    def poll(self) -> list[Notification]:
        arrived: dict[str, list[bytes]] = self._nixl.get_new_notifs()
        return [Notification(peer, payload) for peer, payloads in arrived.items() for payload in payloads if payload]

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        while self._registered:
            self._nixl.deregister_memory(self._registered.pop())


class UcxWrite:
    """A posted nixl transfer request."""

    __slots__ = ("_handle", "_nixl", "_state")

    def __init__(self, nixl: Any, handle: Any) -> None:
        self._nixl = nixl
        self._handle = handle
        self._state = WriteState.PENDING

    def post(self) -> None:
        self._settle(self._nixl.transfer)

    def state(self) -> WriteState:
        if self._state is WriteState.PENDING:
            self._settle(self._nixl.check_xfer_state)
        return self._state

    def release(self) -> None:
        assert self._state is not WriteState.PENDING, "a pending write cannot be released"
        try:
            self._handle.release()
        except _ERRORS as error:
            # The handle stays with nixl, which tries again when the agent goes; its memory is settled either way.
            logger.warning("nixl kept a finished transfer handle: %s", error)

    def _settle(self, ask: Any) -> None:
        try:
            answer = ask(self._handle)
        except _ERRORS as error:
            logger.info("a UCX write failed: %s", error)
            self._state = WriteState.FAILED
            return
        if answer != _PENDING_STATE:
            self._state = WriteState.DONE if answer == _DONE_STATE else WriteState.FAILED


@contextmanager
def _unreachable(peer: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise PeerUnreachable(f"{peer}: {error} (does UCX_TLS name tcp or an RDMA transport?)") from error


def _kind_of(memory: Tensor) -> tuple[str, int]:
    """nixl's name for where `memory` lives, and its device number."""
    return ("VRAM", memory.get_device()) if memory.is_cuda else ("DRAM", 0)
