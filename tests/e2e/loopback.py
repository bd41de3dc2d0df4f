"""HTTP to processes of this machine: around proxies, and without the certificates that no plain HTTP needs.

Reading those takes 25 ms of compute for each request, which is more than most requests cost the servers.
"""

from typing import Any

import httpx

#: Of every request to a server of a test.
PLAIN: dict[str, Any] = {"trust_env": False, "verify": False}


def request(method: str, url: str, *, timeout: float, **options: Any) -> httpx.Response:
    """`options`: as of `httpx.request`. Raises httpx.HTTPError if nothing answers."""
    return httpx.request(method, url, timeout=timeout, **PLAIN, **options)


def get(url: str, *, timeout: float, **options: Any) -> httpx.Response:
    return request("GET", url, timeout=timeout, **options)
