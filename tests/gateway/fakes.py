"""A dispatcher that plays scripts: tokens, pauses and failures, and remembers what became of each generation."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from common.sampling import Candidate, FinishReason, TokenLogprobs
from common.text.tokenizer import Tokenizer
from gateway.generation import GenerationRequest, GenerationStats, ServingLimits, TokenDelta

Step = TokenDelta | Exception | asyncio.Event
Script = Sequence[Step]


class FakeGeneration:
    """Plays a script: yields deltas, waits for events, raises exceptions."""

    def __init__(self, request: GenerationRequest, script: Script, *, cached_tokens: int = 0) -> None:
        self.request = request
        self.closed = asyncio.Event()
        self.cancelled_choices: set[int] = set()
        self.yielded = 0
        self.stats: GenerationStats | None = None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._script = script
        self._cached_tokens = cached_tokens

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        output_tokens = 0
        for step in self._script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            elif step.choice not in self.cancelled_choices:
                assert not self.closed.is_set(), "iterated after aclose"
                # Complete when the first delta comes, and not before.
                self.prompt_logprobs = prompt_scores(self.request)
                output_tokens += len(step.token_ids)
                self.yielded += 1
                yield step
        details: dict[str, float | int | str] = {"transfer_bytes": 4096, "prefill_worker": "p0", "unknown": 1}
        self.stats = GenerationStats(len(self.request.prompt_ids), output_tokens, self._cached_tokens, details)

    def cancel_choice(self, choice: int) -> None:
        self.cancelled_choices.add(choice)

    async def aclose(self) -> None:
        self.closed.set()


class FakeDispatcher:
    """`script_for` says what each request gets; `gate` holds submissions back; `refusal` refuses them."""

    def __init__(
        self,
        script_for: Callable[[GenerationRequest], Script],
        *,
        max_request_tokens: int = 256,
        vocab_size: int = 401,
        cached_tokens: int = 0,
    ) -> None:
        self.script_for = script_for
        self.refusal: Callable[[GenerationRequest], Exception | None] = lambda request: None
        self.gate: asyncio.Event | None = None
        self.requests: list[GenerationRequest] = []
        self.generations: list[FakeGeneration] = []
        self.submit_cancelled = asyncio.Event()
        self._limits = ServingLimits(max_request_tokens, vocab_size)
        self._cached_tokens = cached_tokens

    async def submit(self, request: GenerationRequest) -> FakeGeneration:
        self.requests.append(request)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.submit_cancelled.set()
                raise
        if (error := self.refusal(request)) is not None:
            raise error
        generation = FakeGeneration(request, self.script_for(request), cached_tokens=self._cached_tokens)
        self.generations.append(generation)
        return generation

    def limits(self) -> ServingLimits:
        return self._limits

    @property
    def request(self) -> GenerationRequest:
        """The only request."""
        assert len(self.requests) == 1, f"{len(self.requests)} requests"
        return self.requests[0]

    @property
    def all_closed(self) -> bool:
        return all(generation.closed.is_set() for generation in self.generations)


def deltas(
    ids: Sequence[int],
    *,
    choice: int = 0,
    finish: FinishReason | None = FinishReason.STOP,
    per_delta: int = 1,
    logprobs: int | None = None,
) -> list[TokenDelta]:
    """A choice's tokens, `per_delta` at a time, the last with the finish reason."""
    result = []
    for start in range(0, len(ids), per_delta):
        tokens = tuple(ids[start : start + per_delta])
        last = start + per_delta >= len(ids)
        values = () if logprobs is None else tuple(token_logprobs(id_, logprobs) for id_ in tokens)
        result.append(TokenDelta(choice, start, tokens, values, finish if last else None))
    return result


def token_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The chosen token is the best; the others follow by id, the last one impossible."""
    top = [Candidate((token_id + i) % 400, -0.5 - i) for i in range(count)]
    if count > 1:
        top[-1] = Candidate(top[-1].token_id, float("-inf"))
    return TokenLogprobs(Candidate(token_id, -0.5), tuple(top))


def prompt_scores(request: GenerationRequest) -> tuple[TokenLogprobs, ...]:
    """Of the prompt's tokens from the second on; each is less likely than the `prompt_logprobs` best ones."""
    count = request.params.prompt_logprobs
    if count is None:
        return ()
    best = tuple(Candidate(5 + i, -0.125 * (i + 1)) for i in range(count))
    return tuple(TokenLogprobs(Candidate(id_, -3.0 - i), best) for i, id_ in enumerate(request.prompt_ids[1:]))


def answers(tokenizer: Tokenizer, text: str, *, per_delta: int = 1) -> Callable[[GenerationRequest], Script]:
    """Every choice of every request gets `text` and the end token, or its first max_tokens tokens."""
    end = tokenizer.eos_id
    assert end is not None
    ids = [*tokenizer.encode(text, parse_special=False), end]

    def script_for(request: GenerationRequest) -> Script:
        limit = request.params.max_tokens
        finish = FinishReason.STOP if len(ids) <= limit else FinishReason.LENGTH
        choices = [
            deltas(ids[:limit], choice=choice, finish=finish, per_delta=per_delta, logprobs=request.params.logprobs)
            for choice in range(request.num_choices)
        ]
        return [delta for row in zip(*choices, strict=True) for delta in row]

    return script_for
