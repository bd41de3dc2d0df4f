"""The key that commands send to a server. Knows no server's keys but those that this machine starts one with."""

from collections.abc import Callable, Mapping
from pathlib import Path

from common.config import ENV_PREFIX, F, option
from gateway.tenants import read_key_file


def api_key_option() -> Callable[[F], F]:
    """`--api-key` of a client. Its variable is the gateway's, which may name several keys."""
    return option(
        "--api-key", default="", show_default=False, help="Key to send, if the server wants one; of several the first."
    )


def auth_headers(api_key: str) -> dict[str, str]:
    """What sends a key; nothing for an empty one."""
    words = api_key.split()
    return {"Authorization": f"Bearer {words[0]}"} if words else {}


def own_headers(environ: Mapping[str, str]) -> dict[str, str]:
    """What opens a gateway that gets its keys from this environment. Raises ConfigError (its key file)."""
    if headers := auth_headers(environ.get(f"{ENV_PREFIX}API_KEY", "")):
        return headers
    file = environ.get(f"{ENV_PREFIX}API_KEY_FILE")
    return auth_headers(read_key_file(Path(file))[0].key) if file else {}
