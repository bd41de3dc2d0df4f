"""OpenAI's text completion objects. Knows no sockets and no requests."""

from collections.abc import Iterator, Sequence

from common.text.tokenizer import Tokenizer
from gateway.completion import ChoiceDelta, TextToken, Usage
from gateway.http.formats import Envelope, Json, WholeChoice, finish_json
from gateway.http.logprobs import completion_logprobs


class CompletionFormat:
    """Choice numbers run over all prompts: with two choices each, the second prompt has choices 2 and 3."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, logprobs: bool, choices_per_prompt: int, echoes: Sequence[str]
    ) -> None:
        """
        Args:
            echoes: for each prompt the text to put in front of its choices, "" for none.
        """
        self._envelope = Envelope("cmpl", "text_completion", model)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._choices_per_prompt = choices_per_prompt
        self._echoes = echoes
        self._opened: set[int] = set()

    @property
    def id(self) -> str:
        return self._envelope.id

    def chunks(self, index: int, delta: ChoiceDelta) -> Iterator[Json]:
        echo = "" if index in self._opened else self._echo(index)
        self._opened.add(index)
        text = echo + delta.text
        if text or (self._logprobs and delta.tokens) or delta.finish_reason is not None:
            yield self._envelope.wrap([self._choice(index, text, delta.tokens, finish_json(delta.finish_reason))])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope.wrap([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        return self._envelope.wrap([self._whole_choice(i, choice) for i, choice in enumerate(choices)], usage)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices_per_prompt]

    def _whole_choice(self, index: int, choice: WholeChoice) -> Json:
        text = self._echo(index) + choice.text
        return self._choice(index, text, choice.tokens, finish_json(choice.finish_reason))

    def _choice(self, index: int, text: str, tokens: Sequence[TextToken], finish_reason: str | None) -> Json:
        logprobs = None
        if self._logprobs:
            logprobs = completion_logprobs(self._tokenizer, tokens, len(self._echo(index)))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
