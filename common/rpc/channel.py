"""The one factory of gRPC client channels: keepalive, message limits, fast reconnects."""

import grpc
import grpc.aio

#: Prompts of a million tokens fit; KV never travels in one message of this size.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

#: A dead host is noticed within about 15 s even when no packet says so; a dead process at once.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Channels to one address must not share a connection: each pair's stream lives and dies on its own.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a peer inside the cluster (`host:port`). The caller closes it."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def open_blocking_channel(address: str) -> grpc.Channel:
    """The same for code that runs in a thread without an event loop."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
