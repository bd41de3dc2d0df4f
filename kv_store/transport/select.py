"""Chooses a transport by name, and ties it to the worker's gRPC server if it needs one."""

import importlib
import importlib.util
import logging
from typing import Literal

import grpc.aio

from common.errors import ConfigError
from kv_store.transport.base import Transport
from kv_store.transport.grpc_stream import GrpcTransport

logger = logging.getLogger(__name__)

TransportKind = Literal["auto", "ucx", "grpc"]
_UCX_MODULE = "kv_store.transport.ucx"


def create_transport(kind: TransportKind, agent: str, address: str = "") -> Transport:
    """The transport of this worker: `auto` takes UCX where nixl can be loaded, else gRPC.

    `agent` must be unique and hold the worker's incarnation. `address` is where peers reach this worker's gRPC
    server, if it is known already (see `advertise`). Raises ConfigError for `ucx` on a machine that has none.
    """
    if kind == "grpc":
        return GrpcTransport(agent, address)
    try:
        # By name: this module must load on machines without nixl.
        transport: Transport = importlib.import_module(_UCX_MODULE).UcxTransport(agent)
    except (ImportError, OSError, RuntimeError) as error:
        if kind == "ucx":
            raise ConfigError(f"UCX cannot be used here: {error}", field="transport") from error
        logger.info("KV travels over gRPC, UCX cannot be used here: %s", error)
        return GrpcTransport(agent, address)
    return transport


def attach(transport: Transport, server: grpc.aio.Server) -> None:
    """Let `transport` receive through `server`, if it is the kind that does. Before the server starts."""
    if isinstance(transport, GrpcTransport):
        transport.add_to_server(server)


def advertise(transport: Transport, address: str) -> None:
    """Tell `transport` the `host:port` of this worker's gRPC server, before the first pairing."""
    if isinstance(transport, GrpcTransport):
        transport.address = address
