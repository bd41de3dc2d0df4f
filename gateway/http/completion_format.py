"""OpenAI's text completion objects. Knows no sockets and no requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidRequest
from common.sampling import FinishReason, TokenLogprobs
from common.text.tokenizer import Tokenizer
from gateway.completion import ChoiceDelta, TextToken, Usage
from gateway.http.echo import Echo
from gateway.http.formats import Envelope, Json, finish_json
from gateway.http.json_body import JsonList, json_list
from gateway.http.logprobs import completion_logprobs, echo_logprobs, finite, joined_logprobs
from gateway.http.prompt_logprobs import prompt_logprobs_json
from gateway.pace import Pace

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


@dataclass(slots=True)
class _Prompt:
    """What of an answer in one piece is the same for all choices of a prompt."""

    #: The echo, and the lists of its `logprobs`; nothing if it is not asked for.
    text: list[str] = field(default_factory=list)
    logprobs: dict[str, JsonList] = field(default_factory=dict)
    scores: JsonList | None = None


@dataclass(slots=True)
class _Choice:
    """A choice of an answer in one piece, as far as it has come."""

    text: list[str] = field(default_factory=list)
    #: The lists of its `logprobs`; none if they are not asked for.
    logprobs: dict[str, JsonList] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    #: Of those of its tokens that have log probabilities.
    num_scored: int = 0
    sum_logprobs: float = 0.0

    def add(self, delta: ChoiceDelta) -> None:
        self.text.append(delta.text)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        for token in delta.tokens:
            if token.logprobs is not None:
                self.num_scored += 1
                self.sum_logprobs += finite(token.logprobs.chosen.logprob)

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / self.num_scored if self.num_scored else 0.0


class CompletionFormat:
    """Choice numbers run over all prompts: with two choices each, the second prompt has choices 2 and 3."""

    def __init__(self, model: str, tokenizer: Tokenizer, shape: CompletionShape) -> None:
        self._envelope = Envelope("cmpl", "text_completion", model)
        self._tokenizer = tokenizer
        self._shape = shape
        #: Choices of a stream that have got their echo.
        self._opened: set[int] = set()
        self._prompts: dict[int, _Prompt] = {}
        self._choices: dict[int, _Choice] = {}

    @property
    def id(self) -> str:
        return self._envelope.id

    # --- a stream -------------------------------------------------------------------------------------

    def chunks(self, index: int, delta: ChoiceDelta) -> Iterator[Json]:
        """A long echo with log probabilities takes chunks of its own; its end comes with the first of the answer."""
        assert self._shape.best_of == self._shape.n, "the best choices are known only at the end"
        prompt, text, logprobs = index // self._shape.n, "", None
        if index not in self._opened:
            self._opened.add(index)
            for part in self._echo_parts(prompt, delta.prompt_logprobs):
                if text or logprobs:
                    yield self._envelope.wrap([_choice(index, text, logprobs)])
                text, logprobs = part
        logprobs = _joined(logprobs, self._logprobs(prompt, delta.tokens))
        text += delta.text
        if text or (logprobs is not None and logprobs["tokens"]) or delta.finish_reason is not None:
            yield self._envelope.wrap([_choice(index, text, logprobs, delta)])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope.wrap([], usage)

    # --- in one piece ---------------------------------------------------------------------------------

    async def collect(self, index: int, delta: ChoiceDelta) -> None:
        prompt = index // self._shape.best_of
        if prompt not in self._prompts:
            self._prompts[prompt] = await self._collect_prompt(prompt, delta.prompt_logprobs)
        choice = self._choices.setdefault(index, _Choice())
        choice.add(delta)
        _extend(choice.logprobs, self._logprobs(prompt, delta.tokens))

    async def _collect_prompt(self, index: int, scores: Sequence[TokenLogprobs]) -> _Prompt:
        prompt, pace = _Prompt(), Pace(1)
        for text, logprobs in self._echo_parts(index, scores):
            prompt.text.append(text)
            _extend(prompt.logprobs, logprobs)
            pace.count(1)
            await pace.turn()
        count = self._shape.prompt_logprobs
        if count is not None:
            ids = self._shape.prompt_ids[index]
            prompt.scores = await json_list(prompt_logprobs_json(self._tokenizer, ids, scores, count))
        return prompt

    def whole(self, usage: Usage) -> Json:
        choices = [self._choices[index] for index in sorted(self._choices)]
        shown = [self._whole_choice(index, choice) for index, choice in enumerate(self._best(choices))]
        return self._envelope.wrap(shown, usage)

    def _best(self, choices: Sequence[_Choice]) -> Sequence[_Choice]:
        """Of each prompt's choices the `n` whose tokens are most likely on average."""
        n, best_of = self._shape.n, self._shape.best_of
        if best_of == n:
            return choices
        groups = (choices[start : start + best_of] for start in range(0, len(choices), best_of))
        return [
            choice
            for group in groups
            for choice in sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)[:n]
        ]

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        prompt = self._prompts[index // self._shape.n]
        logprobs = None
        if self._shape.logprobs is not None:
            logprobs = joined_logprobs(prompt.logprobs, choice.logprobs) if prompt.logprobs else choice.logprobs
        whole = _choice(index, "".join((*prompt.text, *choice.text)), logprobs, choice)
        return whole if prompt.scores is None else whole | {"prompt_logprobs": prompt.scores}

    # --- log probabilities ----------------------------------------------------------------------------

    def _echo_parts(self, prompt: int, scores: Sequence[TokenLogprobs]) -> Iterator[tuple[str, Json | None]]:
        """The echo, if it is asked for, with the `logprobs` of its tokens, if those are."""
        echo, count = self._shape.echoes[prompt], self._shape.logprobs
        if echo is not None and count is not None:
            yield from echo_logprobs(self._tokenizer, echo, scores, count)
        elif echo is not None:
            yield echo.text, None

    def _logprobs(self, prompt: int, tokens: Sequence[TextToken]) -> Json | None:
        """Those of output tokens, which come after the echo."""
        if self._shape.logprobs is None:
            return None
        echo = self._shape.echoes[prompt]
        return completion_logprobs(self._tokenizer, tokens, 0 if echo is None else len(echo.text))


def _choice(index: int, text: str, logprobs: Json | None, ended: ChoiceDelta | _Choice | None = None) -> Json:
    """`ended` says whether and why the choice is over."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if ended is None else finish_json(ended.finish_reason),
        "stop_reason": None if ended is None else ended.stop_reason,
    }


def _joined(first: Json | None, second: Json | None) -> Json | None:
    return second if first is None or second is None else joined_logprobs(first, second)


def _extend(lists: dict[str, JsonList], logprobs: Json | None) -> None:
    for name, values in (logprobs or {}).items():
        lists.setdefault(name, JsonList()).extend(values)
