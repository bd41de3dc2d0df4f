"""OpenAI's chat completion objects. Knows no sockets and no requests."""

from collections.abc import Iterator, Sequence

from common.text.tokenizer import Tokenizer
from gateway.completion import ChoiceDelta, Usage
from gateway.http.formats import Envelope, Json, WholeChoice, finish_json
from gateway.http.logprobs import chat_logprobs


class ChatFormat:
    """Each choice of a stream: one role chunk, content chunks, one finish chunk."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, stream: bool, logprobs: bool) -> None:
        self._envelope = Envelope("chatcmpl", "chat.completion.chunk" if stream else "chat.completion", model)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._opened: set[int] = set()

    @property
    def id(self) -> str:
        return self._envelope.id

    def chunks(self, index: int, delta: ChoiceDelta) -> Iterator[Json]:
        if index not in self._opened:
            self._opened.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        if delta.text or (self._logprobs and delta.tokens):
            logprobs = chat_logprobs(self._tokenizer, delta.tokens) if self._logprobs else None
            yield self._chunk(index, {"content": delta.text}, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(index, {}, finish_reason=finish_json(delta.finish_reason))

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope.wrap([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        return self._envelope.wrap([self._whole_choice(i, choice) for i, choice in enumerate(choices)], usage)

    def _chunk(
        self, index: int, delta: Json, *, logprobs: Json | None = None, finish_reason: str | None = None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope.wrap([choice])

    def _whole_choice(self, index: int, choice: WholeChoice) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, choice.tokens) if self._logprobs else None,
            "finish_reason": finish_json(choice.finish_reason),
        }
