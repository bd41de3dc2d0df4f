"""OpenAI's chat completion objects. Knows no sockets and no requests.

Thoughts are `reasoning_content`, in messages and in deltas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.text.tokenizer import Tokenizer
from gateway.chat.answer import ChatAnswer, ChatDelta, WholeMessage
from gateway.chat.parts import Part, ReasoningPart, TextPart, ToolCallArguments, ToolCallStart
from gateway.completion import ChoiceDelta, Usage
from gateway.http.formats import Envelope, Json, WholeChoice
from gateway.http.logprobs import chat_logprobs
from gateway.http.prompt_logprobs import prompt_logprobs_json


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The prompt whose log probabilities are wanted, and how many alternatives."""

    prompt_ids: Sequence[int]
    count: int


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
        self._opened: set[int] = set()

    @property
    def id(self) -> str:
        return self._envelope.id

    def chunks(self, index: int, delta: ChoiceDelta) -> Iterator[Json]:
        if index not in self._opened:
            self._opened.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        read = self._answer.read(index, delta)
        # All log probabilities go with the first chunk: which part a token belongs to need not be known.
        logprobs = self._logprobs_json(read) if self._logprobs and read.tokens else None
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

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        wrapped = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        body = self._with_details(self._envelope.wrap(wrapped, usage))
        scores = self._prompt_scores
        if scores is None:
            return body
        values = choices[0].prompt_logprobs
        return body | {
            "prompt_logprobs": prompt_logprobs_json(self._tokenizer, scores.prompt_ids, values, scores.count)
        }

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

    def _whole_choice(self, index: int, choice: WholeChoice) -> Json:
        whole = ChoiceDelta(index, choice.text, tuple(choice.tokens), choice.finish_reason)
        read = self._answer.read(index, whole)
        return {
            "index": index,
            "message": _message_json(WholeMessage.of(read.parts)),
            "logprobs": self._logprobs_json(read) if self._logprobs else None,
            "finish_reason": None if read.finish is None else read.finish.value,
            "stop_reason": choice.stop_reason,
        }

    def _logprobs_json(self, read: ChatDelta) -> Json:
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


def _message_json(message: WholeMessage) -> Json:
    """`content` is null if there are calls or thoughts, but no words; what there is none of is left out."""
    content = None if (message.calls or message.reasoning) and not message.text else message.text
    body: Json = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return body
