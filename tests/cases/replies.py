"""What came back over HTTP, in one piece or as an event stream; reading it checks its form."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from tests.cases.case_data import Json, Variant

ERROR_FIELDS = {"message", "type", "param", "code"}
REPLACEMENT = "\ufffd"


def strict_json(text: str | bytes) -> Any:
    """Refuses NaN and Infinity, as most parsers do."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True)
class Reply:
    variant: Variant
    status: int
    headers: httpx.Headers
    raw: bytes
    #: Until the whole answer was there.
    seconds: float

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @cached_property
    def json(self) -> Json:
        assert self.headers["content-type"].startswith("application/json"), self
        value = strict_json(self.raw)
        assert isinstance(value, dict), value
        return value

    @cached_property
    def error(self) -> Json:
        """The error object of a refusal."""
        return error_of(self.json)

    # --- streams ---------------------------------------------------------------------------------------

    @cached_property
    def events(self) -> list[Any]:
        """JSON of each event; "[DONE]" as text. Each event is one `data:` line and a blank one, in UTF-8."""
        assert self.status == 200 and self.is_stream, self
        *events, rest = self.raw.decode("utf-8").split("\n\n")
        assert rest == "", f"the stream ends in mid-event: {rest!r}"
        return [_data(event) for event in events]

    @cached_property
    def chunks(self) -> list[Json]:
        """Of a stream that ended well: all events but the last one, which is [DONE]."""
        *chunks, done = self.events
        assert done == "[DONE]" and "[DONE]" not in chunks, self
        assert all("error" not in chunk for chunk in chunks), chunks[-1]
        return chunks

    # --- what was generated ----------------------------------------------------------------------------

    def of_choice(self, index: int) -> Iterator[Json]:
        """The entries of one choice, chunk by chunk."""
        for chunk in self.chunks:
            yield from (choice for choice in chunk["choices"] if choice["index"] == index)

    def pieces(self, index: int = 0) -> list[str]:
        """Texts of a choice as they came."""
        return [_text(choice) for choice in self.of_choice(index)]

    @cached_property
    def texts(self) -> dict[int, str]:
        """By choice."""
        if self.is_stream:
            indices = {choice["index"] for chunk in self.chunks for choice in chunk["choices"]}
            return {index: "".join(self.pieces(index)) for index in sorted(indices)}
        assert self.status == 200, self
        return {choice["index"]: _text(choice) for choice in self.json["choices"]}

    @property
    def text(self) -> str:
        """Of the only choice."""
        (text,) = self.texts.values()
        return text

    @cached_property
    def finish_reasons(self) -> dict[int, str]:
        """By choice; each has exactly one, and nothing behind it."""
        if not self.is_stream:
            return {choice["index"]: choice["finish_reason"] for choice in self.json["choices"]}
        reasons: dict[int, str] = {}
        for index in self.texts:
            entries = list(self.of_choice(index))
            given = [number for number, entry in enumerate(entries) if entry["finish_reason"] is not None]
            assert len(given) == 1, f"choice {index} has {len(given)} finish reasons"
            assert not any(_text(entry) for entry in entries[given[0] + 1 :]), f"choice {index} goes on after its end"
            reasons[index] = entries[given[0]]["finish_reason"]
        return reasons

    @property
    def finish_reason(self) -> str:
        (reason,) = self.finish_reasons.values()
        return reason

    @cached_property
    def usage(self) -> Json:
        """Of a plain answer, or of a stream that was asked for it."""
        usage: Json = self.chunks[-1]["usage"] if self.is_stream else self.json["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage
        return usage

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def logprobs(self) -> list[Any]:
        """Of the only choice, one by one: of chat as OpenAI has them; of completions (token, value, top, offset)."""
        entries = list(self.of_choice(0)) if self.is_stream else self.json["choices"]
        assert all(entry["index"] == 0 for entry in entries), "more than one choice"
        return [entry for choice in entries for entry in logprob_entries(choice)]

    def __repr__(self) -> str:
        return f"<{self.variant.name!r}: {self.status} {self.raw[:2000].decode(errors='replace')}>"


def logprob_entries(choice: Json) -> list[Any]:
    given = choice.get("logprobs")
    if given is None:
        return []
    if "content" in given:
        return list(given["content"] or ())
    columns = (given["tokens"], given["token_logprobs"], given["top_logprobs"], given["text_offset"])
    assert len({len(column) for column in columns}) == 1, given
    return list(zip(*columns, strict=True))


def error_of(body: Any) -> Json:
    """OpenAI's error object out of a body or an event."""
    assert set(body) == {"error"}, body
    error: Json = body["error"]
    assert set(error) >= ERROR_FIELDS, error
    assert isinstance(error["message"], str) and error["message"], error
    assert isinstance(error["type"], str) and error["type"], error
    assert error["param"] is None or isinstance(error["param"], str), error
    return error


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    part = choice.get("delta", choice.get("message"))
    assert part is not None, choice
    return part.get("content") or ""


def _data(event: str) -> Any:
    assert event.startswith("data: ") and "\n" not in event, f"not one data line: {event!r}"
    data = event.removeprefix("data: ")
    return data if data == "[DONE]" else strict_json(data)


class Replies(Mapping[str, Reply]):
    """Replies by name of variant; knows which of them nobody has looked at."""

    def __init__(self, replies: Mapping[str, Reply]) -> None:
        self._replies = replies
        self._unread = set(replies)

    def __getitem__(self, name: str) -> Reply:
        self._unread.discard(name)
        return self._replies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def assert_all_judged(self) -> None:
        assert not self._unread, f"nobody judged {sorted(self._unread)}"
