"""The `--url` of the commands that talk to a server."""

from typing import Any

import click
import httpx


class ServerUrl(click.ParamType[str]):
    """Click type of an http(s) URL; a slash at its end is taken off."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL as error:
            self.fail(f"{text!r} is not a URL: {error}", param, ctx)
        if url.scheme not in ("http", "https") or not url.host:
            self.fail(f"{text!r} is not a URL such as http://127.0.0.1:8000", param, ctx)
        if url.port is not None and not 1 <= url.port <= 65535:
            self.fail(f"{text!r}: the port must be a number from 1 to 65535", param, ctx)
        return text.rstrip("/")


SERVER_URL = ServerUrl()
