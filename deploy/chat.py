"""`tandem chat`: a conversation in the terminal, with any server that speaks OpenAI."""

import contextlib
from collections.abc import Generator
from typing import Any

import click
import httpx

from common.config import option
from common.errors import NoWorker, TandemError
from deploy.api_key import api_key_option, auth_headers
from deploy.refusals import refusal
from deploy.sse import EventParser
from deploy.urls import SERVER_URL

#: Between two pieces of an answer; the first may wait in a queue for long.
READ_SECONDS = 300.0
#: What a chat draws with where nothing is given.
SAMPLING = {"temperature": 0.6, "top_p": 0.95}
HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer"


@click.command(short_help="Talk to a model in the terminal.")
@option("--url", type=SERVER_URL, default="http://127.0.0.1:8000", help="A server that speaks OpenAI.")
@option("--model", envvar="TANDEM_SERVED_MODEL_NAME", help="Model's name there; default: the first listed.")
@api_key_option()
@option("--system", help="System message.")
@option("--temperature", type=click.FloatRange(0), help="Sampling temperature, 0.6 by default; 0: the likeliest words.")
@option("--top-p", type=click.FloatRange(0, 1), help="Words of so much probability are drawn from; 0.95 by default.")
@option("--server-sampling", is_flag=True, help="Leave to server and model what of these two is not given.")
@option("--max-tokens", type=click.IntRange(1), default=512, help="Longest answer, in tokens.")
def command(
    url: str,
    model: str | None,
    api_key: str,
    system: str | None,
    temperature: float | None,
    top_p: float | None,
    server_sampling: bool,
    max_tokens: int,
) -> None:
    """Talk to a model in the terminal: /reset forgets the conversation, /quit leaves, Ctrl-C stops an answer.

    Many models name no sampling of their own. The API then draws from all words by their probability, with which small
    models lose their thread; so a chat here is a little more careful.
    """
    timeout = httpx.Timeout(10.0, read=READ_SECONDS)
    with httpx.Client(base_url=url, headers=auth_headers(api_key), timeout=timeout) as client:
        name = model or first_model(client)
        click.echo(f"{name} at {url} ({HELP})")
        given = {"temperature": temperature, "top_p": top_p}
        sampling = {key: value for key, value in given.items() if value is not None}
        options = {"max_tokens": max_tokens, **({} if server_sampling else SAMPLING), **sampling}
        Conversation(client, {"model": name, **options}, system).run()


class Conversation:
    """The turns so far, and what to send besides them with each request."""

    def __init__(self, client: httpx.Client, options: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._options = options
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def run(self) -> None:
        """Read lines until /quit or the end of input."""
        while (line := _read_line()) is not None and line != "/quit":
            if line == "/reset":
                self._messages = list(self._opening)
            elif line.startswith("/"):
                click.echo(HELP)
            elif line:
                self._turn(line)

    def _turn(self, text: str) -> None:
        """One question and its answer, which may be cut short; a failed one leaves the conversation as it was."""
        self._messages.append({"role": "user", "content": text})
        answer = ""
        try:
            # Leaving the stream closes the connection, which cancels the request on the server.
            with contextlib.closing(self._stream()) as pieces:
                for piece in pieces:
                    answer += piece
                    click.echo(piece, nl=False)
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False)
        except (TandemError, httpx.HTTPError) as error:
            click.echo(f"error: {error or type(error).__name__}", err=True)
        click.echo()
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()

    def _stream(self) -> Generator[str, None, None]:
        body = {**self._options, "messages": self._messages, "stream": True}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.is_error:
                answer.read()
                raise NoWorker(refusal(answer))
            parser = EventParser()
            for chunk in answer.iter_bytes():
                for event in parser.feed(chunk):
                    yield _text(event)


def first_model(client: httpx.Client) -> str:
    """Name of the first model that the server lists.

    Raises:
        NoWorker: the server cannot be reached or lists none.
    """
    try:
        answer = client.get("/v1/models")
        if answer.is_error:
            raise ValueError(refusal(answer))
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise NoWorker(f"{client.base_url} lists no model: {error}") from error


def _read_line() -> str | None:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None


def _text(event: Any) -> str:
    if error := event.get("error"):
        raise NoWorker(str(error.get("message", error)))
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")
