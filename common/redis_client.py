"""The one factory of Redis clients: short timeouts, no hidden retries, text replies.

Everyone who uses Redis must go on without it, so a call fails soon and the caller decides what to do.
"""

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from common.errors import ConfigError

#: Longer than any command of ours takes; short enough that a hung server is left at once.
TIMEOUT_SECONDS = 1.0


def open_redis(url: str, *, timeout: float = TIMEOUT_SECONDS) -> Redis:
    """A client for `redis://host:port/db` (or rediss://, unix://). Connects at first use; close with `aclose()`.

    Raises ConfigError, which does not repeat the URL (it may hold a password), if it cannot be read.
    """
    # Set as client options a retry policy counts for Redis commands and, through the pool, for connecting.
    try:
        client = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
        )
        # Options that there are not would be found at the first connection.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError):
        # `error` may quote the part of a password that it took for the port.
        message = "not a Redis URL: its scheme, port or an option after '?' cannot be read"
        raise ConfigError(message, field="--redis") from None
    return client
