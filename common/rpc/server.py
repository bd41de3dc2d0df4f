"""The one factory of gRPC servers: limits, error table, health and reflection."""

from collections.abc import Iterable, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.config import Address
from common.errors import ConfigError
from common.ports import check_port_is_free
from common.rpc.channel import MAX_MESSAGE_BYTES
from common.rpc.status import ErrorInterceptor

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Accept the keepalive pings of our own channels, which come also on quiet connections: a server that counts them
    # as abuse closes the connection, and with it everything that runs on it.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two processes on one port would share its traffic; a second start must fail instead.
    ("grpc.so_reuseport", 0),
)


class RpcServer:
    """A grpc.aio server with standard health and reflection. Not yet listening when made."""

    def __init__(
        self,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]  # generic in the stubs only
    ) -> None:
        """`interceptors` see calls first; they end them themselves (`common.rpc.status.abort_with`)."""
        options = [
            (key, max_message_bytes if key == "grpc.max_receive_message_length" else value)
            for key, value in SERVER_OPTIONS
        ]
        self.grpc = grpc.aio.server(interceptors=[*interceptors, ErrorInterceptor()], options=options)
        self._services: tuple[str, ...] = ()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # absent from the stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def start(self, host: str, port: int, services: Iterable[str], *, option: str = "--port") -> int:
        """Listen (port 0: any free one) and return the port.

        Args:
            services: full names, for reflection and health.
            option: what the port came from.

        Raises ConfigError naming `option` if the address cannot be bound.
        """
        # gRPC's own errors say less, and its library writes lines of its own about them.
        check_port_is_free(host, port, option)
        self._services = tuple(services)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        try:
            bound = self.grpc.add_insecure_port(str(Address(host, port)))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}", field=option) from error
        await self.set_serving(False)
        await self.grpc.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """What the standard health service answers, for the server as a whole and for each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give running ones `grace` seconds, then end them."""
        await self.grpc.stop(grace)
