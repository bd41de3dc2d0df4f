"""HTTP to processes of this machine, around proxies."""

from typing import Any

import httpx

from tests.factories.http import NO_TLS

#: Of every request to a server of a test.
PLAIN: dict[str, Any] = {"trust_env": False, "verify": NO_TLS}


def request(method: str, url: str, *, timeout: float, **options: Any) -> httpx.Response:
    """`options`: as of `httpx.request`. Raises httpx.HTTPError if nothing answers."""
    return httpx.request(method, url, timeout=timeout, **PLAIN, **options)


def get(url: str, *, timeout: float, **options: Any) -> httpx.Response:
    return request("GET", url, timeout=timeout, **options)
