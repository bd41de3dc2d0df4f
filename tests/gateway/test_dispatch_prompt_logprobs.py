"""Prompt log probabilities at the gateway: whole before the first delta, whatever attempts it takes."""

import asyncio
from collections.abc import Callable

import pytest

from common.sampling import Candidate, TokenLogprobs
from gateway.generation import Generation, TokenDelta
from tests.gateway.dispatching import collect, eventually, request, rig, tokens_of
from tests.gateway.fake_workers import FakeWorker, Run, token

PROMPT = tuple(range(100, 110))
WHOLE = [TokenLogprobs(Candidate(token_id, -0.25)) for token_id in PROMPT[1:]]


async def silent(run: Run) -> None:
    run.accept()


def workers() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker(worker_id="decode-0", behave=silent), FakeWorker(worker_id="decode-1")


async def first_delta(generation: Generation) -> TokenDelta:
    async with asyncio.timeout(20):
        return await anext(aiter(generation))


async def test_they_are_whole_when_the_first_delta_comes() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request(prompt=PROMPT, n=2, prompt_logprobs=0))
        run = await worker.submitted.get()
        assert run.submit.sampling.prompt_logprobs == 0 and run.submit.sampling.HasField("prompt_logprobs")
        run.score(1, 4)
        run.score(4, 5)
        run.score(3)
        run.tokens(1)
        seen = [await first_delta(generation)]
        assert list(generation.prompt_logprobs) == WHOLE
        run.tokens(3)
        run.finish()
        seen += await collect(generation)
        assert tokens_of(seen, 1) == [token(1, index) for index in range(4)]
        assert list(generation.prompt_logprobs) == WHOLE
        parts.assert_clean()


@pytest.mark.parametrize(("prompt", "asked"), [(PROMPT, None), (PROMPT[:1], 3)])
async def test_where_none_are_to_come_none_are_asked_for(prompt: tuple[int, ...], asked: int | None) -> None:
    worker = FakeWorker()
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request(prompt=prompt, prompt_logprobs=asked))
        assert tokens_of(await collect(generation)) == [token(0, index) for index in range(4)]
        assert list(generation.prompt_logprobs) == []
        assert not worker.runs[0].submit.sampling.HasField("prompt_logprobs")


async def test_a_replay_asks_for_those_that_are_not_complete_again() -> None:
    first, second = workers()
    async with rig(first, second) as parts:
        generation = await parts.dispatcher.submit(request(prompt=PROMPT, prompt_logprobs=2))
        run = await first.submitted.get()
        run.score(1, 6)
        await eventually(lambda: len(generation.prompt_logprobs) == 5)
        await first.crash()
        assert tokens_of(await collect(generation)) == [token(0, index) for index in range(4)]
        assert second.runs[0].submit.sampling.prompt_logprobs == 2
        assert list(generation.prompt_logprobs) == WHOLE
        parts.assert_clean()


@pytest.mark.parametrize("count", [0, 2])
async def test_a_replay_does_not_ask_for_what_is_complete(count: int) -> None:
    first, second = workers()
    async with rig(first, second) as parts:
        generation = await parts.dispatcher.submit(request(prompt=PROMPT, prompt_logprobs=2))
        run = await first.submitted.get()
        run.score()
        run.tokens(count)
        await eventually(lambda: len(generation.prompt_logprobs) == len(WHOLE))
        await eventually(lambda: generation.output_tokens == count)  # type: ignore[attr-defined]
        await first.crash()
        assert tokens_of(await collect(generation)) == [token(0, index) for index in range(4)]
        replay = second.runs[0].submit
        assert not replay.sampling.HasField("prompt_logprobs")
        assert [len(choice.output_ids) for choice in replay.choices] == [count]
        assert list(generation.prompt_logprobs) == WHOLE


def gap(run: Run) -> None:
    run.score(1, 3)
    run.score(5)


def nothing_predicts_the_first_token(run: Run) -> None:
    run.score(0)


def tokens_too_early(run: Run) -> None:
    run.score(1, 9)
    run.tokens(1)


def too_many(run: Run) -> None:
    run.submit.prompt_ids.append(7)
    run.score()


@pytest.mark.parametrize("breach", [gap, nothing_predicts_the_first_token, tokens_too_early, too_many])
async def test_a_breach_of_the_protocol_is_a_failed_attempt(breach: Callable[[Run], None]) -> None:
    first, second = workers()
    async with rig(first, second) as parts:
        generation = await parts.dispatcher.submit(request(prompt=PROMPT, prompt_logprobs=2))
        run = await first.submitted.get()
        breach(run)
        assert tokens_of(await collect(generation)) == [token(0, index) for index in range(4)]
        assert list(generation.prompt_logprobs) == WHOLE
        await asyncio.wait_for(run.cancelled.wait(), 10)
        assert len(second.runs) == 1
        parts.assert_clean()


async def test_what_nobody_asked_for_is_a_breach_too() -> None:
    first, second = workers()
    async with rig(first, second) as parts:
        generation = await parts.dispatcher.submit(request(prompt=PROMPT))
        (await first.submitted.get()).score()
        assert tokens_of(await collect(generation)) == [token(0, index) for index in range(4)]
        assert list(generation.prompt_logprobs) == []


async def test_stale_ones_are_dropped() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request(prompt=PROMPT, prompt_logprobs=0))
        run = await worker.submitted.get()
        run.submit.attempt = 5
        run.score(5)
        run.submit.attempt = 0
        run.score()
        run.tokens(4)
        run.finish()
        await collect(generation)
        assert list(generation.prompt_logprobs) == WHOLE


async def test_closing_in_the_middle_holds_nothing() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request(prompt=PROMPT, prompt_logprobs=0))
        run = await worker.submitted.get()
        run.score(1, 4)
        await eventually(lambda: len(generation.prompt_logprobs) == 3)
        await generation.aclose()
        await asyncio.wait_for(run.cancelled.wait(), 10)
        parts.assert_clean()
        await parts.grants_returned()


@pytest.mark.parametrize(("asked", "tokens"), [(None, 130 - 128), (0, 130)])
async def test_the_cached_prefix_does_not_count_for_them(asked: int | None, tokens: int) -> None:
    """Such a prompt is computed whole: that is what it costs in the queue and weighs on its worker."""
    worker = FakeWorker()
    async with rig(worker) as parts:
        await collect(await parts.dispatcher.submit(request("warm", prompt=range(130))))
        worker.behave = silent
        generation = await parts.dispatcher.submit(request("r", prompt=range(130), prompt_logprobs=asked))
        assert parts.loads.tokens == {"decode-0": tokens}
        assert parts.queue.figures.granted_cost == tokens
        await generation.aclose()
        parts.assert_clean()
