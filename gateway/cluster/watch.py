"""Follows one worker address: connects, reads the manifest, reads statuses until the stream breaks, and again.

The open stream is the liveness signal: a killed process breaks it at once, a dead host through keepalive, and a
worker that hangs is noticed because its statuses stop.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio

from common.pb.tandem.v1 import worker_pb2 as pb
from common.pb.tandem.v1 import worker_pb2_grpc
from common.rpc.channel import open_channel
from gateway.cluster.views import Expectation, Link, WorkerRole, WorkerView, mismatch

_log = logging.getLogger(__name__)

#: Seconds without a status (one is due every second) after which a worker counts as lost.
SILENCE_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_FIRST_BACKOFF = 0.05
_MAX_BACKOFF = 2.0


class WorkerWatch:
    """One address; `view` is what is known of it now."""

    def __init__(
        self, address: str, role: WorkerRole, expected: Expectation, changed: Callable[["WorkerWatch"], None]
    ) -> None:
        """`changed` is called after each change of `view`, on the event loop."""
        self.view = WorkerView(address, role, reason="not connected yet")
        #: time.monotonic() since when the link is lost.
        self.lost_since = time.monotonic()
        self._expected = expected
        self._changed = changed

    async def run(self) -> None:
        """Follow the worker until cancelled."""
        backoff = _FIRST_BACKOFF
        while True:
            reason, was_connected = await self._one_connection()
            if was_connected:
                backoff = _FIRST_BACKOFF
            self._lose(reason)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _MAX_BACKOFF)

    async def _one_connection(self) -> tuple[str, bool]:
        """Returns why it ended and whether a status was ever read."""
        connected = False
        # A new channel each time: an old one may sit in its own reconnect backoff.
        async with open_channel(self.view.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            try:
                manifest = await stub.GetManifest(pb.GetManifestRequest(), timeout=_CONNECT_SECONDS)
                call = stub.Watch(pb.WatchRequest())
                while (status := await self._next_status(call)) is not None:
                    connected = True
                    self._see(manifest, status)
            except grpc.aio.AioRpcError as error:
                return _words(error), connected
            except TimeoutError:
                return f"silent for {SILENCE_SECONDS:.0f} s", connected
        return "the worker ended the stream", connected

    async def _next_status(
        self, call: "grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WorkerStatus]"
    ) -> pb.WorkerStatus | None:
        async with asyncio.timeout(SILENCE_SECONDS):
            status = await call.read()
        return status if isinstance(status, pb.WorkerStatus) else None

    def _see(self, manifest: pb.Manifest, status: pb.WorkerStatus) -> None:
        before = self.view
        reason = mismatch(self._expected, before.role, manifest, status)
        link = Link.REFUSED if reason else Link.LIVE
        self.view = WorkerView(before.address, before.role, link, reason, status, manifest, time.monotonic())
        if link is not before.link or status.incarnation != before.incarnation:
            self._tell(link, reason)
        self._changed(self)

    def _tell(self, link: Link, reason: str) -> None:
        extra = {"worker": self.view.worker_id, "role": self.view.role, "address": self.view.address}
        if link is Link.REFUSED:
            _log.error("worker refused: %s", reason, extra=extra)
        else:
            _log.info("worker connected", extra=extra)

    def _lose(self, reason: str) -> None:
        before = self.view
        self.view = replace(before, link=Link.LOST, reason=reason)
        if before.link is not Link.LOST:
            self.lost_since = time.monotonic()
            _log.warning("worker lost: %s", reason, extra={"worker": before.worker_id, "address": before.address})
        if before != self.view:
            self._changed(self)


def _words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
