"""OpenAI's chat completion objects. Knows no sockets and no requests.

Thoughts are `reasoning_content`, in messages and in deltas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.text.tokenizer import Tokenizer
from gateway.chat.answer import ChatAnswer, ChatDelta, ChatFinish, WholeMessage
from gateway.chat.parts import Part, ReasoningPart, TextPart, ToolCallArguments, ToolCallStart
from gateway.completion import ChoiceDelta, Usage
from gateway.http.formats import Envelope, Json
from gateway.http.json_body import JsonList, json_list
from gateway.http.logprobs import chat_logprobs
from gateway.http.prompt_logprobs import prompt_logprobs_json


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The prompt whose log probabilities are wanted, and how many alternatives."""

    prompt_ids: Sequence[int]
    count: int


@dataclass(slots=True)
class _Choice:
    """A choice of an answer in one piece, as far as it has come."""

    message: WholeMessage = field(default_factory=WholeMessage)
    #: Entries of `logprobs.content`.
    logprobs: JsonList = field(default_factory=JsonList)
    finish: ChatFinish | None = None
    stop_reason: str | int | None = None


class ChatFormat:
    """Each choice of a stream: one role chunk, chunks of its parts, one finish chunk."""

    def __init__(
        self,
        envelope: Envelope,
        tokenizer: Tokenizer,
        answer: ChatAnswer,
        *,
        logprobs: bool,
        prompt_scores: PromptScores | None = None,
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._answer = answer
        self._logprobs = logprobs
        self._prompt_scores = prompt_scores
        #: Choices of a stream that have got their role chunk.
        self._opened: set[int] = set()
        self._choices: dict[int, _Choice] = {}
        self._written_prompt_scores: JsonList | None = None

    @property
    def id(self) -> str:
        return self._envelope.id

    def chunks(self, index: int, delta: ChoiceDelta) -> Iterator[Json]:
        if index not in self._opened:
            self._opened.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        read = self._answer.read(index, delta)
        # All log probabilities go with the first chunk: which part a token belongs to need not be known.
        logprobs = _logprobs_json(self._entries(read)) if self._logprobs and read.tokens else None
        deltas = [_part_json(part) for part in read.parts]
        if not deltas and logprobs is not None:
            deltas = [{"content": ""}]
        for part in deltas:
            yield self._chunk(index, part, logprobs=logprobs)
            logprobs = None
        if read.finish is not None:
            yield self._chunk(index, {}, finish_reason=read.finish.value, stop_reason=delta.stop_reason)

    def usage_chunk(self, usage: Usage) -> Json:
        return self._with_details(self._envelope.wrap([], usage))

    async def collect(self, index: int, delta: ChoiceDelta) -> None:
        scores = self._prompt_scores
        if scores is not None and self._written_prompt_scores is None:
            parts = prompt_logprobs_json(self._tokenizer, scores.prompt_ids, delta.prompt_logprobs, scores.count)
            self._written_prompt_scores = await json_list(parts)
        choice = self._choices.setdefault(index, _Choice())
        read = self._answer.read(index, delta)
        for part in read.parts:
            choice.message.add(part)
        if self._logprobs:
            choice.logprobs.extend(self._entries(read))
        choice.finish, choice.stop_reason = read.finish, read.stop_reason

    def whole(self, usage: Usage) -> Json:
        choices = [self._whole_choice(index, choice) for index, choice in sorted(self._choices.items())]
        body = self._with_details(self._envelope.wrap(choices, usage))
        return body if self._prompt_scores is None else body | {"prompt_logprobs": self._written_prompt_scores}

    def _chunk(
        self,
        index: int,
        delta: Json,
        *,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        return self._envelope.wrap([choice])

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        return {
            "index": index,
            "message": _message_json(choice.message),
            "logprobs": _logprobs_json(choice.logprobs) if self._logprobs else None,
            "finish_reason": None if choice.finish is None else choice.finish.value,
            "stop_reason": choice.stop_reason,
        }

    def _entries(self, read: ChatDelta) -> list[Json]:
        return chat_logprobs(self._tokenizer, read.tokens)

    def _with_details(self, body: Json) -> Json:
        """The body with what is known of its completion tokens."""
        body["usage"]["completion_tokens_details"] = {"reasoning_tokens": self._answer.reasoning_tokens}
        return body


def _part_json(part: Part) -> Json:
    """What a part adds to the message; a call's first piece has its id and name."""
    match part:
        case TextPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id_, name):
            call = {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _logprobs_json(entries: list[Json] | JsonList) -> Json:
    return {"content": entries, "refusal": None}


def _message_json(message: WholeMessage) -> Json:
    """`content` is null if there are calls or thoughts, but no words; what there is none of is left out."""
    text, reasoning, calls = message.text, message.reasoning, message.calls
    content = None if (calls or reasoning) and not text else text
    body: Json = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        body["reasoning_content"] = reasoning
    if calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return body
