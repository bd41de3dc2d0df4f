"""Sends one request and notes when each piece of its answer came. Knows OpenAI's stream and nothing of load."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.sse import EventParser

Clock = Callable[[], float]


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are readings of the run's clock, in seconds."""

    sent_at: float
    ended_at: float = 0.0
    #: One per piece of text; a piece may hold several tokens.
    piece_times: list[float] = field(default_factory=list)
    #: As the server's usage says; without one, as many as pieces.
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    #: Why it failed; empty if it did not.
    error: str = ""


class OpenAIClient:
    """Streams completions from one server.

    Args:
        http: a client with the server's base URL; it needs a pool as large as the load.
        endpoint: path to post to, /v1/completions or /v1/chat/completions.
        options: what goes into each body besides prompt and length: model, sampling.
        clock: read at each event.
    """

    def __init__(
        self, http: httpx.AsyncClient, endpoint: str, options: Mapping[str, Any], clock: Clock = time.perf_counter
    ) -> None:
        self.http = http
        self._endpoint = endpoint
        self._options = options
        self.clock = clock

    async def send(self, prompt: str | list[int], output_tokens: int) -> Outcome:
        """One request, to its end. Failures of any kind are told in the outcome, not raised."""
        body = self._body(prompt, output_tokens)
        outcome = Outcome(self.clock())
        try:
            async with self.http.stream("POST", self._endpoint, json=body) as answer:
                if answer.is_error:
                    outcome.error = _refusal(answer.status_code, await answer.aread())
                else:
                    await self._follow(answer, outcome)
        except (httpx.HTTPError, ValueError) as error:
            outcome.error = type(error).__name__
        outcome.ended_at = self.clock()
        return outcome

    def _body(self, prompt: str | list[int], output_tokens: int) -> dict[str, Any]:
        chat = self._endpoint.endswith("/chat/completions")
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {**self._options, **asked, **streamed, "max_tokens": output_tokens}

    async def _follow(self, answer: httpx.Response, outcome: Outcome) -> None:
        parser = EventParser()
        async for chunk in answer.aiter_raw():
            now = self.clock()
            for event in parser.feed(chunk):
                _note(event, now, outcome)
        if not parser.done and not outcome.error:
            outcome.error = "the stream ended without [DONE]"
        if not outcome.error and not outcome.piece_times:
            outcome.error = "no output"
        outcome.output_tokens = outcome.output_tokens or len(outcome.piece_times)


def _note(event: Any, now: float, outcome: Outcome) -> None:
    if error := event.get("error"):
        outcome.error = str(error.get("code") or error.get("type") or "error event")
    if any(_text(choice) for choice in event.get("choices") or ()):
        outcome.piece_times.append(now)
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


def _refusal(status: int, body: bytes) -> str:
    """`503` with the error body's code, if it has one: short, so that equal failures count together."""
    try:
        error = httpx.Response(status, content=body).json()["error"]
        return f"{status} {error.get('code') or error.get('type') or ''}".strip()
    except (ValueError, LookupError, TypeError, AttributeError):
        return str(status)
