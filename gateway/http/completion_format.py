"""OpenAI's text completion objects. Knows no sockets and no requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.errors import InvalidRequest
from common.sampling import TokenLogprobs
from common.text.tokenizer import Tokenizer
from gateway.completion import ChoiceDelta, TextToken, Usage
from gateway.http.echo import Echo
from gateway.http.formats import Envelope, Json, WholeChoice, finish_json
from gateway.http.logprobs import completion_logprobs, echo_logprobs, finite, joined_logprobs
from gateway.http.prompt_logprobs import prompt_logprobs_json

#: Log probabilities of prompts in one answer, which repeats them for each choice: some 30 MB of JSON.
MAX_PROMPT_SCORES = 500_000


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """What of a completion request decides what its answer holds. InvalidRequest if that would be too much."""

    #: For each prompt its ids, and what of it goes in front of each choice.
    prompt_ids: Sequence[Sequence[int]]
    echoes: Sequence[Echo | None]
    #: Choices of each prompt that are shown.
    n: int = 1
    #: Choices of each prompt that are generated; if more than `n`, the most likely ones are shown, best first.
    best_of: int = 1
    #: None: none; k: each token's and the k most likely ones'.
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        echoed = self.logprobs if any(echo is not None for echo in self.echoes) else None
        each = sum(1 + count for count in (echoed, self.prompt_logprobs) if count is not None)
        if each * self.n * sum(map(len, self.prompt_ids)) > MAX_PROMPT_SCORES:
            field = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
            message = f"{field}: more than {MAX_PROMPT_SCORES} log probabilities of prompt tokens, over all choices"
            raise InvalidRequest(message, field=field)


class CompletionFormat:
    """Choice numbers run over all prompts: with two choices each, the second prompt has choices 2 and 3."""

    def __init__(self, model: str, tokenizer: Tokenizer, shape: CompletionShape) -> None:
        self._envelope = Envelope("cmpl", "text_completion", model)
        self._tokenizer = tokenizer
        self._shape = shape
        self._opened: set[int] = set()
        #: By prompt, what is the same for all its choices.
        self._echoed: dict[int, Json] = {}
        self._prompt_scores: dict[int, list[Json | None]] = {}

    @property
    def id(self) -> str:
        return self._envelope.id

    def chunks(self, index: int, delta: ChoiceDelta) -> Iterator[Json]:
        assert self._shape.best_of == self._shape.n, "the best choices are known only at the end"
        echo = None if index in self._opened else self._echo(index)
        self._opened.add(index)
        text = (echo.text if echo is not None else "") + delta.text
        if text or (self._shape.logprobs is not None and (delta.tokens or echo)) or delta.finish_reason is not None:
            logprobs = self._logprobs(index, echo, delta.prompt_logprobs, delta.tokens)
            yield self._envelope.wrap([_choice(index, text, logprobs, delta)])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope.wrap([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        shown = [self._whole_choice(i, choice) for i, choice in enumerate(self._best(choices))]
        return self._envelope.wrap(shown, usage)

    def _best(self, choices: Sequence[WholeChoice]) -> Sequence[WholeChoice]:
        """Of each prompt's choices the `n` whose tokens are most likely on average."""
        n, best_of = self._shape.n, self._shape.best_of
        if best_of == n:
            return choices
        groups = (choices[start : start + best_of] for start in range(0, len(choices), best_of))
        return [choice for group in groups for choice in sorted(group, key=_mean_logprob, reverse=True)[:n]]

    def _whole_choice(self, index: int, choice: WholeChoice) -> Json:
        echo = self._echo(index)
        text = (echo.text if echo is not None else "") + choice.text
        logprobs = self._logprobs(index, echo, choice.prompt_logprobs, choice.tokens)
        whole = _choice(index, text, logprobs, choice)
        if self._shape.prompt_logprobs is not None:
            prompt = index // self._shape.n
            if prompt not in self._prompt_scores:
                self._prompt_scores[prompt] = prompt_logprobs_json(
                    self._tokenizer,
                    self._shape.prompt_ids[prompt],
                    choice.prompt_logprobs,
                    self._shape.prompt_logprobs,
                )
            whole["prompt_logprobs"] = self._prompt_scores[prompt]
        return whole

    def _echo(self, index: int) -> Echo | None:
        return self._shape.echoes[index // self._shape.n]

    def _logprobs(
        self, index: int, echo: Echo | None, scores: Sequence[TokenLogprobs], tokens: Sequence[TextToken]
    ) -> Json | None:
        """Of the tokens of one chunk, or of all; those of the prompt in front if `echo` is given."""
        count = self._shape.logprobs
        if count is None:
            return None
        whole_echo = self._echo(index)
        output = completion_logprobs(self._tokenizer, tokens, len(whole_echo.text) if whole_echo is not None else 0)
        if echo is None:
            return output
        prompt = index // self._shape.n
        if prompt not in self._echoed:
            self._echoed[prompt] = echo_logprobs(self._tokenizer, echo, scores, count)
        return joined_logprobs(self._echoed[prompt], output)


def _choice(index: int, text: str, logprobs: Json | None, ended: ChoiceDelta | WholeChoice) -> Json:
    """`ended` says whether and why the choice is over."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_json(ended.finish_reason),
        "stop_reason": ended.stop_reason,
    }


def _mean_logprob(choice: WholeChoice) -> float:
    values = [finite(token.logprobs.chosen.logprob) for token in choice.tokens if token.logprobs is not None]
    return fmean(values) if values else 0.0
