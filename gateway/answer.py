"""One client request that may hold several prompts: opens their generations and merges them into one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from common.sampling import FinishReason, TokenLogprobs
from common.text.tokenizer import Tokenizer
from gateway.accounting import RequestRecord
from gateway.completion import ChoiceDelta, TextStream, Usage
from gateway.generation import Dispatcher, Generation, GenerationRequest, GenerationStats, TokenDelta
from gateway.tenants import Tenant
from gateway.validation import PreparedRequest

#: Deltas that may wait for their reader while several prompts are merged; the rest waits in the generations. With more
#: of them it would work on one after the other without a turn of the event loop between.
_MERGE_BACKLOG = 1

_Item = tuple[int, ChoiceDelta] | BaseException | None


class Answer:
    """Accepted generations of one client request. Iterate once; `aclose` on every path.

    Choices are numbered through: prompt 0's first, then prompt 1's.
    """

    def __init__(self, streams: Sequence[TextStream], first_choices: Sequence[int], num_choices: int) -> None:
        self._streams = streams
        self._first_choices = first_choices
        self.num_choices = num_choices

    async def __aiter__(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """(choice number, delta) as they come; raises the first error of any prompt."""
        if len(self._streams) == 1:
            async with aclosing(self._streams[0].__aiter__()) as deltas:
                async for delta in deltas:
                    yield delta.choice, delta
            return
        queue: asyncio.Queue[_Item] = asyncio.Queue(_MERGE_BACKLOG)
        pumps = [
            asyncio.create_task(_pump(stream, first, queue))
            for stream, first in zip(self._streams, self._first_choices, strict=True)
        ]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            await _cancel(pumps)

    @property
    def usage(self) -> Usage:
        return sum((stream.usage for stream in self._streams), Usage())

    @property
    def stats(self) -> list[GenerationStats]:
        """Figures of the generations that have ended, in the order of the prompts."""
        return [stream.stats for stream in self._streams if stream.stats is not None]

    async def aclose(self) -> None:
        """Cancel whatever still runs. Idempotent."""
        await asyncio.gather(*(stream.aclose() for stream in self._streams))


class EmptyGeneration:
    """A `Generation` of no tokens: an echo alone, finished by its length."""

    def __init__(self, request: GenerationRequest) -> None:
        self._num_choices = request.num_choices
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.stats: GenerationStats | None = None

    async def __aiter__(self) -> AsyncGenerator[TokenDelta, None]:
        for choice in range(self._num_choices):
            yield TokenDelta(choice, 0, (), finish_reason=FinishReason.LENGTH)

    def cancel_choice(self, choice: int) -> None:
        """Nothing runs."""

    async def aclose(self) -> None:
        """Nothing is held."""


async def open_answer(
    dispatcher: Dispatcher, tokenizer: Tokenizer, prepared: Sequence[PreparedRequest], record: RequestRecord
) -> Answer:
    """Submit every prompt for the record's tenant; returns once all are accepted.

    If one fails or the caller is cancelled, none stays open.
    """
    generations = await _submit_all(dispatcher, [_owned(request.generation, record.tenant) for request in prepared])
    streams: list[TextStream] = []
    first_choices: list[int] = []
    num_choices = 0
    for generation, request in zip(generations, prepared, strict=True):
        first_choices.append(num_choices)
        num_choices += request.generation.num_choices
        prompt_tokens = len(request.generation.prompt_ids)
        record.prompt_accepted(prompt_tokens)
        streams.append(
            TextStream(
                generation,
                tokenizer,
                request.text,
                record,
                prompt_tokens=prompt_tokens,
                num_choices=request.generation.num_choices,
            )
        )
    return Answer(streams, first_choices, num_choices)


def _owned(request: GenerationRequest, tenant: Tenant) -> GenerationRequest:
    return replace(request, tenant=tenant.name, cache_salt=tenant.salted(request.cache_salt))


async def _submit_all(dispatcher: Dispatcher, requests: Sequence[GenerationRequest]) -> list[Generation]:
    if len(requests) == 1:
        return [await _submit(dispatcher, requests[0])]
    tasks = [asyncio.create_task(_submit(dispatcher, request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await _cancel(tasks)
        opened = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        await asyncio.gather(*(generation.aclose() for generation in opened))
        raise


async def _submit(dispatcher: Dispatcher, request: GenerationRequest) -> Generation:
    """Nothing to generate needs no worker."""
    if request.params.max_tokens == 0:
        return EmptyGeneration(request)
    return await dispatcher.submit(request)


async def _pump(stream: TextStream, first_choice: int, queue: asyncio.Queue[_Item]) -> None:
    """Moves one prompt's deltas into the queue, then its error or None."""
    try:
        async for delta in stream:
            await queue.put((first_choice + delta.choice, delta))
    except Exception as error:  # handed over whole: the reader raises it
        await queue.put(error)
    else:
        await queue.put(None)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
