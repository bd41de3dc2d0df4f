"""The output of a response as it grows: items, and the events that tell of them. Knows no response and no sockets."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from gateway.chat.answer import ChatAnswer
from gateway.chat.parts import Part, ReasoningPart, TextPart, ToolCallArguments, ToolCallStart
from gateway.completion import ChoiceDelta, TextToken
from gateway.http.formats import Json
from gateway.http.json_body import JsonList
from gateway.http.responses.items import new_id

#: Log probabilities of tokens, as `output_text.logprobs` holds them; none if they are not wanted.
Logprobs = Callable[[Sequence[TextToken]], list[Json]]


class Item(Protocol):
    """One output item. Events are without sequence number; `output_index` is that of the item."""

    @property
    def json(self) -> Json:
        """The item as it is now."""
        ...

    def opened(self) -> list[Json]: ...

    def closed(self, status: str) -> list[Json]:
        """`status`: completed or incomplete."""
        ...


class MessageItem:
    """Words for the user: a message with one part."""

    def __init__(self, output_index: int) -> None:
        self._id = new_id("msg")
        self._index = output_index
        self._status = "in_progress"
        self._text: list[str] = []
        self._logprobs = JsonList()
        self._has_part = False

    @property
    def json(self) -> Json:
        content = [self._part()] if self._has_part else []
        return {"id": self._id, "type": "message", "status": self._status, "role": "assistant", "content": content}

    def opened(self) -> list[Json]:
        added = _item_event("added", self._index, self.json)
        self._has_part = True
        return [added, self._event("response.content_part.added", part=self._part())]

    def add(self, text: str, logprobs: JsonList) -> list[Json]:
        self._text.append(text)
        self._logprobs.extend(logprobs)
        return [self._event("response.output_text.delta", delta=text, logprobs=logprobs)]

    def closed(self, status: str) -> list[Json]:
        self._status = status
        part = self._part()
        return [
            self._event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", part=part),
            _item_event("done", self._index, self.json),
        ]

    def _part(self) -> Json:
        text = "".join(self._text)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs.copy()}

    def _event(self, type_: str, **fields: object) -> Json:
        return {"type": type_, "item_id": self._id, "output_index": self._index, "content_index": 0, **fields}


class ReasoningItem:
    """What the model thinks before it answers; shown as it is, so there is no summary."""

    def __init__(self, output_index: int) -> None:
        self._id = new_id("rs")
        self._index = output_index
        self._status = "in_progress"
        self._text: list[str] = []
        self._has_part = False

    @property
    def json(self) -> Json:
        content = [self._part()] if self._has_part else []
        return {"id": self._id, "type": "reasoning", "status": self._status, "summary": [], "content": content}

    def opened(self) -> list[Json]:
        added = _item_event("added", self._index, self.json)
        self._has_part = True
        return [added, self._event("response.content_part.added", part=self._part())]

    def add(self, text: str) -> list[Json]:
        self._text.append(text)
        return [self._event("response.reasoning_text.delta", delta=text)]

    def closed(self, status: str) -> list[Json]:
        self._status = status
        part = self._part()
        return [
            self._event("response.reasoning_text.done", text=part["text"]),
            self._event("response.content_part.done", part=part),
            _item_event("done", self._index, self.json),
        ]

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": "".join(self._text)}

    def _event(self, type_: str, **fields: object) -> Json:
        return {"type": type_, "item_id": self._id, "output_index": self._index, "content_index": 0, **fields}


class CallItem:
    """A call of a function."""

    def __init__(self, output_index: int, start: ToolCallStart) -> None:
        self._id = new_id("fc")
        self._index = output_index
        self._start = start
        self._status = "in_progress"
        self._arguments: list[str] = []

    @property
    def json(self) -> Json:
        return {
            "id": self._id,
            "type": "function_call",
            "status": self._status,
            "call_id": self._start.id,
            "name": self._start.name,
            "arguments": "".join(self._arguments),
        }

    def opened(self) -> list[Json]:
        return [_item_event("added", self._index, self.json)]

    def add(self, text: str) -> list[Json]:
        self._arguments.append(text)
        return [self._event("response.function_call_arguments.delta", delta=text)]

    def closed(self, status: str) -> list[Json]:
        self._status = status
        item = self.json
        done = self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        return [done, _item_event("done", self._index, item)]

    def _event(self, type_: str, **fields: object) -> Json:
        return {"type": type_, "item_id": self._id, "output_index": self._index, **fields}


def _item_event(what: str, output_index: int, item: Json) -> Json:
    return {"type": f"response.output_item.{what}", "output_index": output_index, "item": item}


class Output:
    """The items of one answer. Feed it every delta, then `finish`.

    Deltas are read token by token, so that log probabilities go to the words that they are of.
    """

    def __init__(self, answer: ChatAnswer, logprobs: Logprobs) -> None:
        self._answer = answer
        self._logprobs = logprobs
        self._items: list[Item] = []
        #: The last item while it may still grow.
        self._open: Item | None = None
        #: Space that is part of a message if words follow.
        self._blank = ""
        #: Tokens whose part is not known yet: the log probability of each, and the number of characters that it
        #: completed. They are written when they come: those that wait for their part may be many.
        self._tokens: list[tuple[JsonList, int]] = []
        self._shown = 0

    @property
    def json(self) -> list[Json]:
        return [item.json for item in self._items]

    @property
    def reasoning_tokens(self) -> int:
        return self._answer.reasoning_tokens

    def read(self, delta: ChoiceDelta) -> list[Json]:
        """The events of one delta."""
        events: list[Json] = []
        for piece in _pieces(delta, self._shown):
            self._tokens += [(JsonList(self._logprobs([token])), len(piece.text)) for token in piece.tokens]
            for part in self._answer.read(0, piece).parts:
                events += self._take(part)
        self._shown += len(delta.text)
        return _merged(events)

    def finish(self, status: str) -> list[Json]:
        """The events of the end of the last item; an answer of nothing is an empty message."""
        events: list[Json] = []
        if not self._items:
            events += self._open_message()
        if isinstance(self._open, MessageItem):
            events += self._last_words(self._open)
        return _merged(events) + self._close(status)

    def abandon(self) -> None:
        """The answer breaks off here; its last item stays as it is."""
        self._close("incomplete")

    def _take(self, part: Part) -> list[Json]:
        match part:
            case TextPart(text):
                return self._take_text(text)
            case ReasoningPart(text):
                return self._take_reasoning(text)
            case ToolCallStart():
                return self._take_call(part)
            case ToolCallArguments(_, text):
                assert isinstance(self._open, CallItem), "arguments without a call"
                self._tokens.clear()
                return self._open.add(text)

    def _take_text(self, text: str) -> list[Json]:
        events: list[Json] = []
        if not isinstance(self._open, MessageItem):
            self._blank += text
            if not self._blank.strip():
                return []
            text, self._blank = self._blank, ""
            events += self._open_message()
        assert isinstance(self._open, MessageItem)
        return events + self._open.add(text, self._take_logprobs(len(text)))

    def _open_message(self) -> list[Json]:
        return self._start(MessageItem(len(self._items)))

    def _last_words(self, message: MessageItem) -> list[Json]:
        """Tokens without text (the end token), and the space that is all of an answer."""
        text, self._blank = self._blank, ""
        logprobs = JsonList.joined(written for written, _ in self._tokens)
        return message.add(text, logprobs) if text or logprobs else []

    def _take_reasoning(self, text: str) -> list[Json]:
        events: list[Json] = []
        if not isinstance(self._open, ReasoningItem):
            events += self._start(ReasoningItem(len(self._items)))
        assert isinstance(self._open, ReasoningItem)
        self._tokens.clear()
        return events + self._open.add(text)

    def _take_call(self, start: ToolCallStart) -> list[Json]:
        self._tokens.clear()
        return self._start(CallItem(len(self._items), start))

    def _start(self, item: MessageItem | ReasoningItem | CallItem) -> list[Json]:
        events = self._close("completed")
        if not isinstance(item, MessageItem):
            self._blank = ""
        self._items.append(item)
        self._open = item
        return events + item.opened()

    def _close(self, status: str) -> list[Json]:
        item, self._open = self._open, None
        return [] if item is None else item.closed(status)

    def _take_logprobs(self, characters: int) -> JsonList:
        """Those of the last tokens that make so many characters; what came before them was a mark."""
        first = len(self._tokens)
        while first and (characters > 0 or self._tokens[first - 1][1] == 0):
            first -= 1
            characters -= self._tokens[first][1]
        logprobs = JsonList.joined(written for written, _ in self._tokens[first:])
        self._tokens.clear()
        return logprobs


def _pieces(delta: ChoiceDelta, shown: int) -> Iterator[ChoiceDelta]:
    """The delta, cut where its tokens begin; `shown`: characters of the choice before it."""
    if len(delta.tokens) <= 1:
        yield delta
        return
    position, end = 0, len(delta.text)
    for token, following in pairwise(delta.tokens):
        next_position = max(position, min(following.offset - shown, end))
        yield ChoiceDelta(delta.choice, delta.text[position:next_position], (token,), None)
        position = next_position
    yield replace(delta, text=delta.text[position:], tokens=delta.tokens[-1:])


def _merged(events: list[Json]) -> list[Json]:
    """Neighbouring deltas of the same item become one."""
    merged: list[Json] = []
    for event in events:
        last = merged[-1] if merged else {}
        if "delta" in event and last.get("type") == event["type"] and last["item_id"] == event["item_id"]:
            last["delta"] += event["delta"]
            if "logprobs" in event:
                last["logprobs"] += event["logprobs"]
        else:
            merged.append(event)
    return merged
