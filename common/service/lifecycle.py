"""A worker process from start to exit: listen, announce, serve, drain, stop. Knows no model and no role."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server

from common.errors import ConfigError
from common.registry import Announcer, WorkerRecord
from common.rpc.server import RpcServer
from common.service.identity import WorkerIdentity
from common.service.options import ProcessOptions
from common.service.tasks import end_task, spawn_essential

_log = logging.getLogger(__name__)


class ShutdownSignal:
    """What ends the process: SIGTERM, SIGINT, a Drain call, or a fatal error in a thread.

    The first request asks to drain; the second one to stop at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.fatal: BaseException | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.request)

    def request(self) -> None:
        if self.drain.is_set():
            self.now.set()
        self.drain.set()

    def fail(self, error: BaseException) -> None:
        """From any thread: the process cannot go on."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self.fatal = self.fatal or error
        self.drain.set()
        self.now.set()


@dataclass(frozen=True, slots=True)
class Drainable:
    """How a role is wound down.

    Attributes:
        begin: refuse new work from now on.
        is_idle: whether nothing runs any more.
    """

    begin: Callable[[], Awaitable[None]]
    is_idle: Callable[[], bool]


async def listen(server: RpcServer, options: ProcessOptions, services: Iterable[str]) -> str:
    """Start `server` and return the address under which peers reach it."""
    port = await server.start(options.host, options.port, services)
    return str(options.advertise) if options.advertise is not None else f"{options.host}:{port}"


async def serve_until_shutdown(
    *,
    identity: WorkerIdentity,
    model: str,
    address: str,
    options: ProcessOptions,
    server: RpcServer,
    metrics: CollectorRegistry,
    shutdown: ShutdownSignal,
    role: Drainable,
) -> None:
    """Announce the worker, wait for the end, drain. The caller then stops what it started.

    Raises the error that made a thread of the worker die.
    """
    if options.metrics_port:
        _serve_metrics(options, metrics)
    async with contextlib.AsyncExitStack() as stack:
        if options.redis:
            record = WorkerRecord(identity.worker_id, identity.role, address, identity.incarnation, model, identity.pid)
            await stack.enter_async_context(_announced(Announcer(options.redis, record), shutdown))
        await server.set_serving(True)
        _log.info("ready", extra={"worker": identity.worker_id, "address": address})
        await shutdown.drain.wait()
        _log.info("draining", extra={"worker": identity.worker_id})
        await server.set_serving(False)
        await role.begin()
        await _wait_idle(role, shutdown, options.drain_seconds)
    if shutdown.fatal is not None:
        raise shutdown.fatal


def _serve_metrics(options: ProcessOptions, metrics: CollectorRegistry) -> None:
    try:
        start_http_server(options.metrics_port, addr=options.host, registry=metrics)
    except OSError as error:
        where = f"{options.host}:{options.metrics_port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}", field="--metrics-port") from error


@contextlib.asynccontextmanager
async def _announced(announcer: Announcer, shutdown: ShutdownSignal) -> AsyncIterator[None]:
    task = spawn_essential(announcer.run(), "announcer", shutdown.fail)
    try:
        yield
    finally:
        await end_task(task)
        await announcer.withdraw()


async def _wait_idle(role: Drainable, shutdown: ShutdownSignal, seconds: float) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not role.is_idle() and not shutdown.now.is_set():
        if asyncio.get_running_loop().time() >= deadline:
            _log.warning("drain time is over; ending what still runs")
            return
        # A drain is rare and its end is not urgent; polling keeps the engine free of a callback for it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(shutdown.now.wait(), 0.05)
