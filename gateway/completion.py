"""Text out of tokens: deltas of token ids become deltas of text per choice, with stop strings. Knows no API.

Rules that every edge shares:

- a character comes out whole, a stop string or what may be the start of one does not come out at all;
- a token goes out together with the text it completes, in order, none left out: a choice has as many tokens as its
  usage counts, those that spell a stop string and the end token included;
- the token that ended a choice (end token, stop token) adds no text unless `include_stop` says so;
- stop strings are looked for from the output token on that follows the first `min_tokens`.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from common.sampling import FinishReason, TokenLogprobs
from common.text.detokenizer import Detokenizer
from common.text.stop_strings import StopChecker
from common.text.tokenizer import Tokenizer
from gateway.accounting import RequestRecord
from gateway.generation import Generation, GenerationStats, TokenDelta


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What of a request concerns text only."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    #: Special tokens whose text is kept all the same: the marks of a tool call or of reasoning, for their parser.
    kept_special_ids: frozenset[int] = frozenset()
    #: No output is wanted: the one token that had to be drawn, so that the prompt gets its scores, is forgotten.
    drop_output: bool = False
    #: The caller's own, which `stop_reason` tells from the model's end tokens.
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TextToken:
    """One output token of a choice."""

    token_id: int
    #: Characters of the choice's text before it.
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text of one choice and the tokens that it completes; either may be empty, not all three."""

    choice: int
    text: str
    tokens: tuple[TextToken, ...]
    finish_reason: FinishReason | None
    #: On a choice's first delta, if asked for: those of the prompt's tokens from the second on.
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    #: What of the caller's ended the choice: the stop string that was met, or the stop token's id.
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, or of several added up."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


class ChoiceText:
    """The text of one choice so far, and what of it has been shown."""

    def __init__(self, choice: int, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._choice = choice
        self._options = options
        skipped = tokenizer.special_ids - options.kept_special_ids if options.skip_special_tokens else frozenset[int]()
        self._detokenizer = Detokenizer(tokenizer, skipped_ids=skipped)
        self._stops = StopChecker(options.stop, include_stop=options.include_stop)
        #: Tokens not yet shown, each with the number of characters decoded after it.
        self._pending: list[tuple[TextToken, int]] = []
        self._decoded = 0
        self._shown = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was met; the tokens behind it are of no interest."""
        return self._stops.hit is not None

    def push(self, delta: TokenDelta) -> ChoiceDelta | None:
        """What can be shown after these tokens; None if that is nothing new."""
        if self._options.drop_output:
            self.finish_reason = FinishReason.LENGTH
            return ChoiceDelta(self._choice, "", (), self.finish_reason)
        text = ""
        last = len(delta.token_ids) - 1
        for index, token_id in enumerate(delta.token_ids):
            ends = index == last and delta.finish_reason is FinishReason.STOP
            text += self._push_token(token_id, delta.logprobs[index] if delta.logprobs else None, ends=ends)
            if self.stopped:
                break
        if delta.finish_reason is not None and not self.stopped:
            text += self._push_text(self._detokenizer.flush())
            text += "" if self.stopped else self._stops.flush()
        self.finish_reason = FinishReason.STOP if self.stopped else delta.finish_reason
        return self._show(text)

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None, *, ends: bool) -> str:
        token = TextToken(token_id, self._decoded, logprobs)
        silent = ends and not self._options.include_stop
        piece = "" if silent else self._detokenizer.push(token_id)
        self.num_tokens += 1
        text = self._push_text(piece)
        self._pending.append((token, self._decoded))
        return text

    def _push_text(self, piece: str) -> str:
        self._decoded += len(piece)
        if self.num_tokens <= self._options.min_tokens:
            return piece
        return self._stops.push(piece)

    def _show(self, text: str) -> ChoiceDelta | None:
        self._shown += len(text)
        tokens = self._take_shown()
        if not text and not tokens and self.finish_reason is None:
            return None
        return ChoiceDelta(self._choice, text, tokens, self.finish_reason, stop_reason=self._stop_reason(tokens))

    def _stop_reason(self, shown: Sequence[TextToken]) -> str | int | None:
        if self.stopped or self.finish_reason is not FinishReason.STOP or not shown:
            return self._stops.hit
        last = shown[-1].token_id
        return last if last in self._options.stop_token_ids else None

    def _take_shown(self) -> tuple[TextToken, ...]:
        """Tokens whose text is out; at the end all, offsets kept within the text."""
        finished = self.finish_reason is not None
        count = 0
        while count < len(self._pending) and (finished or self._pending[count][1] <= self._shown):
            count += 1
        taken = [token for token, _ in self._pending[:count]]
        del self._pending[:count]
        return tuple(TextToken(t.token_id, min(t.offset, self._shown), t.logprobs) for t in taken)


class TextStream:
    """One accepted generation as text. Iterate once; `aclose` on every path."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        options: TextOptions,
        record: RequestRecord,
        *,
        prompt_tokens: int,
        num_choices: int,
    ) -> None:
        self._generation = generation
        self._record = record
        self._prompt_tokens = prompt_tokens
        self._choices = [ChoiceText(choice, tokenizer, options) for choice in range(num_choices)]
        #: Choices that have shown something.
        self._begun: set[int] = set()

    async def __aiter__(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Deltas as they come; raises what the generation raises."""
        async for delta in self._generation:
            choice = self._choices[delta.choice]
            if choice.finish_reason is not None:
                continue
            before = choice.num_tokens
            shown = choice.push(delta)
            self._record.tokens_arrived(choice.num_tokens - before, stream=(id(self), delta.choice))
            if choice.stopped:
                self._generation.cancel_choice(delta.choice)
            if shown is not None:
                yield self._with_prompt(shown)
        unfinished = [index for index, choice in enumerate(self._choices) if choice.finish_reason is None]
        assert not unfinished, f"generation ended with choices {unfinished} of {len(self._choices)} unfinished"
        self._record.generation_ended(self.usage.cached_tokens, self._generation.stats)

    def _with_prompt(self, delta: ChoiceDelta) -> ChoiceDelta:
        if delta.choice in self._begun:
            return delta
        self._begun.add(delta.choice)
        return replace(delta, prompt_logprobs=self._generation.prompt_logprobs)

    @property
    def usage(self) -> Usage:
        """Tokens so far; `cached_tokens` is known at the end."""
        stats = self._generation.stats
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=0 if stats is None else stats.cached_tokens,
        )

    @property
    def stats(self) -> GenerationStats | None:
        return self._generation.stats

    async def aclose(self) -> None:
        await self._generation.aclose()
